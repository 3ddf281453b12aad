"""``product-key`` checks before it measures; what it measures is the machine's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import product_key
from tests.benchmarks.conftest import Run

SMALL = ["product-key", "--device", "cpu", "--rows", "8", "--rounds", "1"]
SMALL += ["--sides", "4", "16", "--choices", "4", "9"]


def test_both_ways_are_measured(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "results" / "product-key.json"
    status, printed = run(*SMALL, "--json", path)
    assert status == 0, printed
    content = json.loads(path.read_text())
    assert content["kind"] == "product-key" and content["rows"] == 8
    assert content["environment"]["torch"] == torch.__version__ and content["command"]
    ways = ["topk forward", "topk backward", "forward", "backward"]
    names = [result["name"] for result in content["results"]]
    assert names == ways * 4 + ["layer", "private layer"]
    assert all(result["median"] > 0 for result in content["results"])
    assert "s 16, k 9" in printed


def test_the_plain_way_chooses_the_same_where_nothing_ties() -> None:
    x, y = torch.randn(20, 16), torch.randn(20, 16)
    for ours, plain in zip(product_key.route(x, y, 9), product_key.eager(x, y, 9), strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize(("what", "words"), [(0, "scores are off"), (1, "other experts")])
def test_a_wrong_result_stops_it(
    what: int, words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = product_key.route

    def wrong(x: Tensor, y: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores, indices = right(x, y, k)
        return (scores + 0.1, indices) if what == 0 else (scores, indices.flip(1))

    monkeypatch.setattr(product_key, "route", wrong)
    status, printed = run(*SMALL)
    assert status == 1 and words in printed, printed


def test_wrong_norms_stop_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    right = product_key.private

    def other(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.1)
        return right(model)

    monkeypatch.setattr(product_key, "private", other)
    status, printed = run(*SMALL)
    assert status == 1 and "norms of the layer are off" in printed, printed
