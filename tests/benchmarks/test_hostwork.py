"""``python -m benchmarks hostwork``: how many calls a private layer costs the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import hostwork

#: Calls of a layer and step that the library may make, beside those of its operations.
MOST = 60


@pytest.mark.parametrize("name", ["bert", "smollm"])
def test_a_layer_costs_the_host_few_calls(name: str) -> None:
    row, functions = hostwork.measure(name, steps=1)
    assert 10 < row["calls_per_layer"] <= MOST, functions.most_common(20)
    assert sum(row["calls_by_part"].values()) == pytest.approx(row["calls_per_layer"])


#: Kernels that the first step of a model may have compiled, beside the optimizer's one.
KERNELS = 15


@pytest.mark.parametrize(
    "names",
    [
        ["wrn-16-4", "bert-base"],
        pytest.param(["dpt", "unet", "resnet50-gn", "convnext-t"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)], ids=["bf16", "fp32"]
)
def test_a_model_has_few_kernels(names: list[str], dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "kernels.json"
    command = ["hostwork", "--kernels", *names, "--dtype", dtype, "--json", str(file)]
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-m", "benchmarks", *command], env=environment, check=True)
    found = {row["model"]: row["kernels"] for row in json.loads(file.read_text())["rows"]}
    assert [*found] == names
    for kernels in found.values():
        assert 5 < sum(kernels.values()) <= KERNELS, kernels
