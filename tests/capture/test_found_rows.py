"""Rows that are parts of samples, found without a declaration; and rows that only look like it.

Shape suffixes: B samples, T positions, d features.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proof.gate import Gate
from flash_clipping.capture.session import ProofState
from flash_clipping.diagnostics import check
from tests.support.autograd import (
    check_by_autograd,
    float64s,
    mean_squares,
    squares,
    truth_by_autograd,
)
from tests.support.errors import raises


class Flat(nn.Module):
    """Positions of all samples are one axis, ``order`` says in which order: OPT's feed-forward."""

    def __init__(self, order: str = "samples first") -> None:
        super().__init__()
        self.embed, self.ffn, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.LayerNorm(4)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        B, T = h.shape[:2]
        if self.order == "positions first":
            rows = self.ffn(self.norm(h.transpose(0, 1).reshape(T * B, 4)))
            return self.head(h + rows.view(T, B, 4).transpose(0, 1))
        if self.order == "halves":
            halves = h.unflatten(1, (2, T // 2)).transpose(0, 1).reshape(B * T, 4)
            back = self.ffn(self.norm(halves)).view(2, B, T // 2, 4).transpose(0, 1)
            return self.head(h + back.reshape(B, T, 4))
        return self.head(h + self.ffn(self.norm(h.reshape(B * T, 4))).view_as(h))


def refused(model: nn.Module, batch: tuple[Tensor, ...], words: str) -> None:
    flash = GradSampleModuleFlashClipping(model.double())
    with raises("FC201", match=words):
        squares(flash, batch).backward()
    assert all(param.grad is None for param in model.parameters())


def found_by_check(model: nn.Module, x: Tensor) -> None:
    """The look before a first step does not see what values decide."""
    report = check(model.double(), x, strict=False)
    assert any("values of sample 0 are extreme" in failure for failure in report.failures), report


class Sometimes(Flat):
    """In another order under a condition, which does not hold in the first step."""

    def __init__(self, condition: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: Tensor) -> Tensor:
        self.order = "positions first" if self.condition(self, x) else "samples first"
        return super().forward(x)


CONDITIONS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "item": lambda _, x: x.max() > 20,
    "float": lambda _, x: float(x.max()) > 20,
    "list": lambda _, x: max(x.flatten().tolist()) > 20,
    "numpy": lambda _, x: x.detach().numpy().max() > 20,
}


@pytest.mark.parametrize("how", CONDITIONS)
def test_values_that_python_reads(how: str) -> None:
    """An order that follows from them may be another one in the next batch: a check tells."""
    torch.manual_seed(0)
    found_by_check(Sometimes(CONDITIONS[how]), *float64s(3, 2, 3))


@pytest.mark.parametrize("order", ["samples first", "positions first"])
def test_without_the_oracle_values_tell_of_parts_that_lie_together(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in models over several processes."""
    apart = property(lambda session: False, lambda session, value: None)
    monkeypatch.setattr(ProofState, "has_oracle", apart)
    monkeypatch.setattr(Gate, "examine", lambda *_: None)
    torch.manual_seed(0)
    if order == "samples first":
        check_by_autograd(Flat().double(), float64s(4, 3, 3), squares)
    else:
        refused(Flat(order), float64s(4, 3, 3), r"ffn .* 12 rows for a batch of 4")


class Gated(Flat):
    """What is behind a gate that is still 0 shows no order, here the wrong one."""

    def __init__(self, order: str) -> None:
        super().__init__(order)
        self.embed.weight.data.zero_()
        self.embed.bias.data.zero_()


class Chosen(nn.Module):
    """Rows that values choose: by a mask, or sorted. In this batch they lie sample by sample."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.expert, self.head, self.by = nn.Linear(3, 3), nn.Linear(3, 2), by

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        if self.by == "mask":
            places = (rows[:, 0] > 0).nonzero().squeeze(1)
        elif self.by == "sort":
            places = (rows[:, 0] > 9).long().argsort(stable=True)
        else:
            places = rows[:, 1].sort().indices
        out = rows.index_put((places,), self.expert(rows[places]))
        return self.head(out.view_as(x))


@pytest.mark.parametrize("by", ["mask", "sort", "values"])
def test_rows_that_values_choose(by: str) -> None:
    torch.manual_seed(0)
    (x,) = float64s(3, 4, 3)
    x[..., 0] = torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    x[..., 1] = torch.arange(12.0).view(3, 4).double()
    if by == "mask":  # of another batch there are not as many for each sample
        refused(Chosen(by), (x,), r"expert \(Linear\): what it reads has 6 rows")
    else:
        found_by_check(Chosen(by), x)


class DeclaredToken(nn.Module):
    """As :class:`TokenOfFrames`, of a layer that a user declares."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.flatten(0, 1))
        token = self.token(0 * h[:, 0])[: len(x)]
        return self.head(token.square() + h.unflatten(0, x.shape[:2]).mean((1, 2)))


@pytest.mark.parametrize("layer", ["token", "ffn"])
def test_declared_rows_that_are_of_other_samples(layer: str) -> None:
    """By their values they could be of any: all are alike. Gradients show that the declaration is
    wrong."""
    torch.manual_seed(0)
    model, shape = (
        (DeclaredToken(), (3, 2, 2, 3))
        if layer == "token"
        else (Gated("positions first"), (3, 2, 3))
    )
    declared = ["embed", "token"] if layer == "token" else ["ffn", "norm"]
    flash = GradSampleModuleFlashClipping(model.double(), folded_modules=declared)
    with raises("FC210", match=rf"{layer}.* rows that are booked to others"):
        squares(flash, float64s(*shape)).backward()


class LossAlone(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return mean_squares(super().forward(x))


def test_a_model_that_returns_its_loss_alone() -> None:
    """Norms of single samples show where samples are."""
    torch.manual_seed(0)
    model = LossAlone().double()
    flash = GradSampleModuleFlashClipping(model)
    (x,) = float64s(3, 4, 3)
    flash(x).backward()
    reference = Flat().double()
    reference.load_state_dict(model.state_dict())
    truth = truth_by_autograd(reference, (x,), squares)
    torch.testing.assert_close(flash.get_norm_sample(), truth.norms, rtol=1e-9, atol=0)
    refused(LossAlone("positions first"), (x,), r"(?s)ffn.*a sample's rows lie apart")
    unused = LossAlone("positions first")
    unused.beside = nn.Linear(2, 2)  # what gets no gradient shows nothing
    refused(unused, (x,), r"(?s)ffn.*a sample's rows lie apart")


@pytest.mark.parametrize("first", [1, 4])
def test_samples_that_reach_each_other_behind_a_first_batch_of_one(first: int) -> None:
    """Equal ones show it beside an extreme one; a sample alone mixes with nobody."""

    class Rolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).tanh()
            return self.second(y + y.detach().roll(1, 0))

    model = Rolled().double()
    flash = GradSampleModuleFlashClipping(model)
    alike = (float64s(1, 3)[0].expand(first, 3),)
    if first == 1:
        squares(flash, alike).backward()
    for batch in (float64s(4, 3), float64s(4, 3)) if first == 1 else (alike, float64s(4, 3)):
        flash.zero_grad(set_to_none=True)
        with raises("FC202", match="expected rounding alone|second"):
            squares(flash, batch).backward()
