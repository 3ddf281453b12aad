"""Benchmarks of operations check before they time; what they time is the machine's business."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.ops import hyper_connections, kernels, product_key
from tests.benchmarks.conftest import Run

#: Command -> options that make it small, and the names of its results in their order.
SMALL: dict[str, tuple[list[str], list[str]]] = {
    "kernels": (
        ["--shape", "2,32,16,24", "--rows", "2,16,16", "--convolution", "3,16,20,6,3,1,1"],
        ["matmul", "gram", "outer", "outer_store", "clipped_sum", "copy", "weighted_sum"]
        + ["copy", "row_scale", "layer_norm", "rms_norm", "embedding", "noise", "group_norm"]
        + ["weight gradient", "norms", "gradients", "sum of gradients", "clipped sum"]
        + ["forward", "norms", "weight gradients", "clipped sums"],
    ),
    "hyper-connections": (
        ["--shape", "2,3,2,8"],
        ["copy", "forward", "backward", "mix", "mix backward"]
        + ["eager step", "step", "private step"],
    ),
    "product-key": (
        ["--rows", "8", "--sides", "4", "16", "--choices", "4", "9"],
        ["topk forward", "topk backward", "forward", "backward"] * 4 + ["layer", "private layer"],
    ),
}


def small(name: str) -> list[str]:
    return [name, "--device", "cpu", "--rounds", "1", *SMALL[name][0]]


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_measures_each_operation_beside_its_floor(
    name: str, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "results" / "found.json"
    status, printed = run(*small(name), "--json", path)
    assert status == 0, printed
    content = json.loads(path.read_text())
    assert content["kind"] == name and content["environment"]["torch"] == torch.__version__
    assert content["command"].startswith(f"python -m benchmarks {name}")
    results = content["results"]
    assert [result["name"] for result in results] == SMALL[name][1]
    assert all(result["median"] > 0 and result["group"] in printed for result in results)
    named = {(result["group"], result["name"]): result for result in results}
    for result in results:
        assert bool(result["floor"]) == (result["of_floor"] is not None)
        if result["floor"]:
            floor = named[result["group"], result["floor"]]
            assert result["of_floor"] == pytest.approx(result["rate"] / floor["rate"])


def scaled(found: Any) -> Any:
    return found * 1.001 if isinstance(found, Tensor) else (found[0] * 1.001, *found[1:])


@pytest.mark.parametrize(
    ("name", "where", "what", "words"),
    [
        ("kernels", kernels.ops, "outer_sqnorms", "a norm is wrong"),
        ("hyper-connections", hyper_connections.mixing, "stream_mix", "streams: an error"),
        ("product-key", product_key, "route", "scores are off"),
    ],
)
def test_a_wrong_result_stops_a_benchmark(
    name: str, where: Any, what: str, words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(where, what)
    monkeypatch.setattr(where, what, lambda *args, **kwargs: scaled(right(*args, **kwargs)))
    status, printed = run(*small(name))
    assert status == 1 and words in printed and "nothing is timed" in printed, printed
