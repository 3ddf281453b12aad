"""``profile``: kernels of a step by kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lab.profile import OTHERS, kind_of
from tests.benchmarks.conftest import Run


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("_gram_ring_kernel", "_gram_ring_kernel"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nt_align1>", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        (
            "sm90_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc",
            "convolutions",
        ),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add", OTHERS),
    ],
)
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_without_a_gpu_there_are_none(run: Run) -> None:
    status, printed = run("profile", "--device", "cpu", "--model", "tiny")
    assert status == 2 and "profile: kernels are those of a GPU" in printed


@pytest.mark.gpu
def test_a_step_on_a_gpu(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    methods = "nonprivate,nonprivate-graph,flash,flash-graph"
    status, printed = run("profile", "--model", "tiny", "--methods", methods, "--json", file)
    assert status == 0, printed
    found = json.loads(file.read_text())["milliseconds"]["tiny"]
    assert set(found) == set(methods.split(","))
    for name, times in found.items():
        ours = [kind for kind in times if kind.startswith("_") and kind.endswith("_kernel")]
        assert bool(ours) == name.startswith("flash"), times
        assert times["all kernels"] > times["products"] > 0
