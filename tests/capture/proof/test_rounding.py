"""Rounding is not taken for a mistake, and mistakes are not taken for rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proof import oracle
from flash_clipping.capture.proof.oracle import Table
from flash_clipping.capture.proof.repeatable import moved, perturbed
from tests.capture.proof.mixers import WRONG, Around, B, K, T
from tests.capture.proof.proving import why_refused

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("same_numbers")]

SIZES, D = (5, 7, 3), 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        a, gate = self.up(self.between(x)).chunk(2, -1)
        return x + self.down(a * F.relu(gate))


class FeatureTokens(nn.Module):
    """An FT-Transformer: a token for every number and for every category, and one to classify."""

    def __init__(self, numbers: int = 8) -> None:
        super().__init__()
        self.weight, self.bias, self.of_categories, self.of_class = (
            nn.Parameter(torch.empty(n, D).uniform_(-(D**-0.5), D**-0.5))
            for n in (numbers, numbers, len(SIZES), 1)
        )
        self.tables = nn.ModuleList(nn.Embedding(n, D) for n in SIZES)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 2)

    def forward(self, x: Tensor, categories: Tensor) -> Tensor:
        tokens = x[..., None] * self.weight + self.bias
        found = [table(ids) for table, ids in zip(self.tables, categories.T, strict=True)]
        of_class = self.of_class.expand(len(x), 1, -1)
        h = torch.cat([of_class, tokens, torch.stack(found, 1) + self.of_categories], 1)
        return self.head(F.relu(self.norm(self.blocks(h)[:, 0])))


def samples(count: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    categories = torch.stack([torch.randint(0, n, (count,)) for n in SIZES], 1)
    return torch.randn(count, 8), categories, torch.randint(0, 2, (count,))


@pytest.fixture
def in_bf16() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def train(flash: Any) -> None:
    x, categories, y = samples()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(flash(x, categories).float(), y)
    loss.backward()


@pytest.mark.parametrize("seed", range(3))
def test_first_steps_under_autocast(seed: int) -> None:
    torch.manual_seed(seed)
    train(GradSampleModuleFlashClipping(FeatureTokens(), max_grad_norm=1.0))


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
    for _ in range(3):
        flash._watch.gate.next_audit = flash._watch.gate.calls + 1
        flash.zero_grad()
        flash(torch.randn(B, K)).square().sum().backward()
    assert rounds == [False, True, False, True, False]


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
