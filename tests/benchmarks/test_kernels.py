"""``kernels`` checks, measures and judges; what it measures is the machine's business."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernels

SMALL = ["--device", "cpu", "--shape", "2,32,16,24", "--rows", "2,16,16", "--rounds", "1"]


def test_every_operation_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results" / "kernels.json"
    assert kernels.main([*SMALL, "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["kind"] == "kernels" and content["environment"]["torch"] == torch.__version__
    names = {result["name"] for result in content["results"]}
    assert {"matmul", "gram", "outer", "outer_store", "weighted_sum", "embedding"} <= names
    assert all(result["median"] > 0 for result in content["results"])
    (choice,) = content["choices"]
    assert choice["chosen"] in choice["milliseconds"] and choice["regret"] >= 0
    assert "outer_store" in capsys.readouterr().out


def test_a_wrong_norm_stops_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels.ops, "gram_sqnorms", lambda A, Gs: (torch.ones(1, len(A)), None))
    assert kernels.main(SMALL) == 1
    assert "a norm is wrong" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["uniform", "repeated"])
def test_wrong_noise_stops_it(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(sums: list[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        if how == "uniform":
            return [torch.rand_like(summed) for summed in sums]
        return [torch.randn_like(sums[0])] * len(sums)

    monkeypatch.setattr(kernels, "noisy_means", wrong)
    assert kernels.main(SMALL) == 1
    assert "noise is wrong" in capsys.readouterr().out


def test_a_shape_has_four_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.main(["--shape", "8,1024"])
    assert "expected 4 positive integers" in capsys.readouterr().err
