"""A batch made of what an earlier call returned: its gradients depend on that call's samples."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.errors import raises, warns

WARNING = "is a result of an earlier call"

MODES = pytest.mark.parametrize("mode", ["one_pass", "two_pass", "one_by_one"])

pytestmark = pytest.mark.filterwarnings("ignore:mode=:UserWarning")


class Memory(nn.Module):
    """Returns its state beside the output, as Transformer-XL does, and what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, mems: Any = None) -> tuple[Tensor, Any, Tensor]:
        known = 0 if mems is None else mems["h"][:, :4]
        h = torch.tanh(self.cell(x + known) + self.bias)
        return self.out(h), {"h": torch.cat([h, h], 1)}, x


def private(**options: Any) -> GradSampleModuleFlashClipping:
    torch.manual_seed(0)
    return GradSampleModuleFlashClipping(Memory(), loss_reduction="sum", **options)


def backward(model: nn.Module, out: Tensor) -> None:
    out.square().sum().backward()
    model.zero_grad(set_to_none=True)


HELD: dict[str, Callable[[Tensor], Tensor]] = {
    "detached": lambda h: h.detach(),
    "data": lambda h: h.data,
    "a part of it": lambda h: h.detach()[:, 2:6],
    "some rows": lambda h: h.detach()[:3],
    "with a gradient of its own": lambda h: h.detach().requires_grad_(),
}


@MODES
@pytest.mark.parametrize("held", HELD)
def test_a_result_of_an_earlier_batch_is_warned_of(mode: str, held: str) -> None:
    model = private(mode=mode)
    x = torch.randn(3, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        out, mems, _ = model(x)
        backward(model, out)
        if mode == "two_pass" and held == "with a gradient of its own":
            with raises("FC416"):
                model(x, {"h": HELD[held](mems["h"])})
            return
        for _ in range(2):
            assert not [one for one in caught if WARNING in str(one.message)][1:]
            out, mems, _ = model(torch.randn(3, 4), {"h": HELD[held](mems["h"])})
            backward(model, out)
    (found,) = [str(one.message) for one in caught if WARNING in str(one.message)]
    assert found.startswith("FC515 the model: tensor 2 of 2 among its inputs")
    assert found.splitlines()[-1] == "    mems = None"


@MODES
def test_nobody_is_warned_of_anything_else(mode: str) -> None:
    """State within one backward pass; inputs that come back, and parameters; looks at the model."""
    model = private(mode=mode)
    x, first = torch.randn(3, 4), {"h": torch.zeros(3, 8)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="mode=")
        for _ in range(3):
            mems, total = first, torch.zeros(())
            for _ in range(2):
                out, mems, _ = model(x, mems)
                mems = {"h": mems["h"].detach()}
                total = total + out.square().sum()
            backward(model, total)
            with torch.no_grad():
                model(x, mems)
        own = model._module.cell.weight
        step = model.running_step
        step.returned_after[own.untyped_storage()] = 0
        step.await_backward([own.detach()])


class Cell(nn.RNNCell):
    """Returns its state and nothing else."""


def test_a_state_that_is_all_that_is_returned_is_warned_of_too() -> None:
    model = GradSampleModuleFlashClipping(Cell(4, 4), loss_reduction="sum")
    h = torch.zeros(3, 4)
    h = model(torch.randn(3, 4), h)
    backward(model, h)
    with warns("FC515", match=WARNING):
        model(torch.randn(3, 4), h.detach())


def test_what_was_returned_is_not_kept() -> None:
    model = private()
    out, mems, _ = model(torch.randn(3, 4))
    held = [weakref.ref(leaf.untyped_storage()) for leaf in (out, mems["h"])]
    assert all(ref() is not None for ref in held)
    del out, mems
    assert [ref() for ref in held] == [None, None]
