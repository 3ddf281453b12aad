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


def test_passages_are_whole(script: Any) -> None:
    rows = script.passages(["abcdefg", "  a\n b", "xy"], 3)
    assert [bytes(row.tolist()) for row in rows] == [b"abc", b"def", b"a b"]
    assert len(script.public_texts()) > 1000


def test_n_grams_are_probabilities(script: Any) -> None:
    rows = torch.randint(97, 101, (30, 12), generator=torch.Generator().manual_seed(0))
    grams = script.NGrams(rows, order=3)
    for before in (b"", b"a", b"dab", b"zz"):
        total = sum(grams._probability(before, byte) for byte in range(256))
        assert total == pytest.approx(1)
    # By hand, of one passage: behind "a" came "b" twice, of 5 bytes "a" twice and "b" twice.
    grams = script.NGrams(torch.tensor([[97, 98, 99, 97, 98]]), order=2)
    alone = (2 + 3 / 256) / 8
    assert grams._probability(b"a", 98) == pytest.approx((2 + alone) / 3)
    assert grams.perplexity(torch.tensor([[98]])) == pytest.approx(1 / alone)


def test_windows_that_are_copied(script: Any) -> None:
    rows, of = torch.arange(30)[None], torch.arange(5, 28)[None]
    assert script.copied(rows, of, window=20) == 4 / 11
    assert script.copied(rows, of.flip(1), window=20) == 0


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
