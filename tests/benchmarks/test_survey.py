"""``survey``: the page of all kinds of models of ``transformers``, and a few of its rows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from benchmarks.survey import END, PAGE, START
from benchmarks.survey.kinds import all_kinds
from benchmarks.survey.measure import DRAWS, EXACT, WRONG, measure
from benchmarks.survey.page import render, written
from tests.benchmarks.conftest import Run


def test_the_page_has_every_kind() -> None:
    generated = PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0]
    names = [*written(generated), *re.findall(r"\| `?(.+?)`? \| not measured \|", generated)]
    assert sorted(names) == sorted(name for kinds in all_kinds().values() for name in kinds)
    assert WRONG not in generated


def test_the_page_is_what_is_read_of_it() -> None:
    """Kinds that are not measured again stay as they are."""
    generated = PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0]
    kept = written(generated)
    assert written(render(all_kinds(), {}, kept)) == kept
    assert kept["BertForMaskedLM"][0] == EXACT and kept["OPTForCausalLM"][1].count(", ") == 1


def test_rows_are_measured(run: Run) -> None:
    status, printed = run("survey", "--only", "OPTForCausalLM", "--limit", "300")
    assert status == 0, printed
    assert "OPTForCausalLM: exact" in printed
    assert run("survey", "--only", "Nothing")[0] == 2


class Turned(torch.autograd.Function):
    """Nothing in forward; backward turns the sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Tensor:
        return -G


class Draws(nn.Module):
    """A layer with dropout, which may draw from another seed, or go backward by another formula."""

    other = ""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.other == "draws":
            torch.rand(1)
        x = F.dropout(self.layer(x), 0.5, self.training)
        return Turned.apply(x) if self.other == "gradient" else x


@pytest.mark.parametrize(("other", "verdict"), [("", EXACT), ("draws", DRAWS), ("gradient", WRONG)])
def test_dropout_is_that_of_a_plain_forward(other: str, verdict: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 3, dtype=torch.float64)

    def prepare(model: Draws) -> None:  # once the truth is known
        model.other = other

    assert measure(Draws().double(), {"x": x}, 3, chance=True, prepare=prepare).verdict == verdict
