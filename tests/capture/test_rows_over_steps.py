"""Rows that lie in another order at a later step: exact, or refused there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.row_layouts import Layout
from tests.support.autograd import float64s, squares
from tests.support.errors import raises
from tests.zoo.rows import CASES

pytestmark = pytest.mark.without_gate


class Around(nn.Module):
    """``inner`` between two layers that have the batch first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Linear(3, 4), inner, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(x))))


def norms_like_the_truth(model: nn.Module, flash: Any, batch: tuple[Tensor, ...]) -> None:
    model.zero_grad(set_to_none=True)
    squares(flash, batch).backward()
    found = flash.get_norm_sample()
    flash.disable_hooks()
    truth = []
    for b in range(len(batch[0])):
        model.zero_grad(set_to_none=True)
        squares(flash, (batch[0][b : b + 1],)).backward()
        truth.append(math.hypot(*(float(p.grad.norm()) for p in model.parameters())))
    flash.enable_hooks()
    model.zero_grad(set_to_none=True)
    torch.testing.assert_close(found, found.new_tensor(truth), rtol=1e-9, atol=0)


class Windows(nn.Module):
    """Windows of four positions in front of the samples: of a longer text, rows that lie apart."""

    def __init__(self, inner: nn.Module, flat: bool = False) -> None:
        super().__init__()
        self.inner, self.flat = inner, flat

    def forward(self, h: Tensor) -> Tensor:
        w_WBTd = h.unflatten(1, (-1, 4)).transpose(0, 1)
        rows = w_WBTd.flatten(0, 2 if self.flat else 1)
        return self.inner(rows).view(w_WBTd.shape).transpose(0, 1).flatten(1, 2)


def test_rows_that_lie_apart_in_a_declared_module_are_refused() -> None:
    torch.manual_seed(0)
    model = Around(Windows(nn.Linear(4, 4))).double()
    flash = GradSampleModuleFlashClipping(model, folded_modules=["inner.inner"])
    with raises("FC202", match=r"expected rounding alone"):
        squares(flash, float64s(3, 8, 3)).backward()


@pytest.mark.parametrize("flat", [False, True])
def test_text_with_more_windows_than_the_first_is_refused(flat: bool) -> None:
    """With one window its rows are samples, or parts of them that lie together; with two they lie
    apart."""
    torch.manual_seed(0)
    model = Around(Windows(nn.Linear(4, 4), flat)).double()
    flash = GradSampleModuleFlashClipping(model)
    for positions in (4, 8, 4, 12):
        if positions == 4:
            norms_like_the_truth(model, flash, float64s(3, positions, 3))
            continue
        with raises("FC201", match=r"inner\.inner"):
            squares(flash, float64s(3, positions, 3)).backward()


class Turns(nn.Module):
    """In another order under a condition that does not hold in the first step."""

    def __init__(self, condition: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.ffn, self.condition = nn.Linear(4, 4), condition

    def forward(self, h: Tensor) -> Tensor:
        if self.condition(self, h):
            return self.ffn(h)
        return self.ffn(h.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("when", ["evaluation", "longer"])
def test_another_axis_at_a_later_step_is_refused(when: str, turned: bool) -> None:
    """Parts of other sizes would do along either axis: in the end it is values that tell."""
    torch.manual_seed(0)
    conditions: dict[str, Callable[[nn.Module, Tensor], object]] = {
        "evaluation": lambda self, h: not self.training,
        "longer": lambda _, h: h.shape[1] > 5,
    }
    model = Around(Turns(lambda m, h: bool(conditions[when](m, h)) != turned)).double()
    flash = GradSampleModuleFlashClipping(model)
    squares(flash, float64s(3, 4, 3)).backward()
    model.zero_grad(set_to_none=True)
    flash.train(when != "evaluation")
    x = float64s(3, 6, 3)
    for _ in range(2):
        with raises("FC201|FC232", match="ffn"):
            squares(flash, x).backward()
        assert all(param.grad is None for param in model.parameters())


def test_layout_of_parts_is_undone() -> None:
    x = torch.arange(24).view(2, 12)
    layout = Layout(1)
    assert layout.parts(x, 3) == 4 and layout.parts(x, 5) is None and layout.parts(x, 0) is None
    front = layout.front(x, 3)
    assert front[1].flatten().tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert torch.equal(layout.back(front), x)
    assert layout.only(x, 1, 3).count_nonzero() == 8
    layout.check("layer", torch.zeros(5, 9), 3)
    with raises("FC232", match="layer"):
        layout.check("layer", torch.zeros(6, 5), 3)


def test_batch_as_long_as_one_seen_is_not_rehearsed_again() -> None:
    torch.manual_seed(0)
    calls = []
    model = CASES["time first"].make()[0]
    flash = GradSampleModuleFlashClipping(model)
    squares(flash, float64s(3, 4, 3)).backward()
    model.first.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    for positions in (4, 8, 6, 5, 9):
        model.zero_grad(set_to_none=True)
        squares(flash, float64s(3, positions, 3)).backward()
        counts.append(len(calls))
        calls.clear()
    assert [n > 1 for n in counts] == [False, True, False, False, True]
