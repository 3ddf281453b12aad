"""Rounding is not taken for a mistake, and mistakes are not taken for rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proof import oracle
from flash_clipping.capture.proof.oracle import Table
from flash_clipping.capture.proof.repeatable import moved, perturbed
from tests.capture.proof.mixers import WRONG, Around, B, K, T
from tests.capture.proof.proving import why_refused

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("same_numbers")]


@pytest.fixture
def in_bf16() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


#: The first two are seen by float32 alone: bf16 rounds as much.
@pytest.mark.parametrize(
    "name", ["eight bits", "longest", "mean, faint", "a coin, torch", "rolled"]
)
def test_wrong_models_under_autocast(name: str, in_bf16: None) -> None:
    def why(seed: int) -> str:
        torch.manual_seed(seed)
        return why_refused(Around(WRONG[name]), torch.randn(B, T, K), audits=2)

    assert any(map(why, range(8)))  # not every batch shows more than bf16 rounds


def test_what_is_wrong_in_a_narrow_dtype_alone(in_bf16: None) -> None:
    def inner(m: Any, h: Tensor) -> Tensor:
        h = m.layer(h)
        return h - h.mean(0) if h.dtype == torch.bfloat16 else h

    assert why_refused(Around(inner), torch.randn(B, T, K))


def test_a_finding_that_is_not_found_again_is_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    own = oracle._round_of

    def first_is_wrong(subject: Any, how: Any) -> Table:
        table = own(subject, how)
        if not rounds:
            table.unfit, table.outputs = {0: "rounding"}, ()
        rounds.append(how.seed)
        return table

    monkeypatch.setattr(oracle, "_round_of", first_is_wrong)
    flash = GradSampleModuleFlashClipping(nn.Linear(K, 2), max_grad_norm=1.0)
    x = torch.randn(B, K)
    flash(x).square().sum().backward()
    assert rounds == [0, 0, 1, 2, 1]  # as it is; with three seeds in float64; again as it is
    flash.zero_grad()
    flash(x).square().sum().backward()
    assert len(rounds) == 6  # the next call is looked at
    flash.zero_grad()
    flash(x).square().sum().backward()
    assert len(rounds) == 6


def test_two_runs_alone_refuse_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an audit finds in two runs, and all of the check does not, is rounding."""
    rounds: list[bool] = []
    own = oracle._round_of

    def brief_is_wrong(subject: Any, how: Any) -> Table:
        table = own(subject, how)
        if how.brief:
            table.unfit, table.outputs = {0: "rounding"}, ()
        rounds.append(how.brief)
        return table

    monkeypatch.setattr(oracle, "_round_of", brief_is_wrong)
    flash = GradSampleModuleFlashClipping(nn.Linear(K, 2), max_grad_norm=1.0)
    for calls in (0, 64, 128):
        flash._watch.gate.calls = calls
        flash._watch.gate.next_audit = calls + 1
        flash.zero_grad()
        flash(torch.randn(B, K)).square().sum().backward()
    assert rounds == [False, *[True, False, False, False] * 2]
    assert flash._watch.gate._watched  # chance is made alike from then on


def test_parameters_are_moved_in_their_own_dtype() -> None:
    """Autocast on a GPU computes ``torch.addr`` in 16 bits."""
    found: list[bool] = []

    def how(data: Tensor, generator: torch.Generator) -> Tensor:
        found.append(torch.is_autocast_enabled("cpu"))
        return moved(data, generator)

    param = nn.Parameter(torch.randn(3, 2))
    with torch.autocast("cpu", torch.bfloat16):
        with perturbed([param], how):
            assert param.dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
    assert found == [False]
