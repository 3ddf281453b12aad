"""The example of private text runs, small, and with privacy has a finite epsilon."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG turned off")

SMALL = [
    *("--width", "16", "--layers", "1", "--length", "48", "--rank", "2", "--public-steps", "3"),
    *("--steps", "2", "--batch-size", "32", "--max-physical-batch-size", "16", "--canaries", "40"),
    *("--held-out", "20", "--synthetic", "12", "--device", "cpu"),
]


SCRIPT = "private_text"


@pytest.mark.parametrize("private", [True, False])
def test_short_run_of_private_text_writes_its_results(
    script: Any,
    tmp_path: Path,
    private: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # To parse the standard library takes seconds.
    monkeypatch.setattr(script, "public_texts", lambda: [math.__doc__, *[re.__doc__] * 9])
    more = [] if private else ["--not-private"]
    before, after, found = script.main([*SMALL, "--output", str(tmp_path), *more])
    assert 1 < before < 400 and after != before
    assert found.canaries == 40 and not found.violated
    assert (found.epsilon <= 8.0) if private else math.isinf(found.epsilon)
    assert "12 synthetic passages, three of them:" in capsys.readouterr().out


def test_synthetic_passages_follow_the_model(script: Any) -> None:
    """A model that knows one text by heart, byte by byte, writes it."""

    class Cycle(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(50.0))

        def forward(self, ids: Tensor) -> Tensor:
            return self.scale * torch.nn.functional.one_hot((ids + 1) % 256, 256).float()

        def generate(self, input_ids: Tensor, min_new_tokens: int, **options: Any) -> Tensor:
            assert options["do_sample"] and options["top_k"] == 0
            for _ in range(min_new_tokens):
                chance = self(input_ids[:, -1]).softmax(-1)
                input_ids = torch.cat([input_ids, chance.multinomial(1)], 1)
            return input_ids

    texts = script.sampled(Cycle(), torch.arange(150)[:, None], 5)
    assert torch.equal(texts, torch.arange(150)[:, None] + torch.arange(5))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_synthetic_text_is_worth_more_than_before(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's run with half of the steps, and fewer passages."""
    settings = ["--width=64", "--layers=2", "--batch-size=256", "--device=cpu", "--synthetic=500"]
    steps = ["--public-steps=200", "--steps=60"]
    script.main([*settings, *steps, f"--output={tmp_path}"])
    out = capsys.readouterr().out
    found = {
        name: float(re.search(rf"^    {name} +([\d.]+)", out, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("public", "synthetic, before", "synthetic", "private", "synthetic in canaries")
    }
    assert found["private"] < found["synthetic"] < found["synthetic, before"]
    assert found["synthetic in canaries"] == 0
