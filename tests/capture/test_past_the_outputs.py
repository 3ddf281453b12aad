"""``mode="two_pass"`` and gradients that do not come through what the model returned."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.errors import raises
from tests.zoo.outputs import CASES, CLOSED

pytestmark = pytest.mark.without_gate

B, D = 4, 6


class Keeps(nn.Module):
    """Returns one tensor, and keeps another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        y = self.a(h)
        self.kept[:] = [self.b(h)]
        return y


def wrapped() -> GradSampleModuleFlashClipping:
    torch.manual_seed(0)
    return GradSampleModuleFlashClipping(Keeps().double(), mode="two_pass", max_grad_norm=0.1)


@pytest.mark.parametrize("kept_first", [False, True])
def test_a_kept_tensor_beside_the_output_is_refused(kept_first: bool) -> None:
    """Each part would be clipped by itself, and a sample would move their sum by 2 C."""
    module = wrapped()
    output = module(torch.randn(B, D, dtype=torch.float64))
    losses = [output.square().sum(1).mean()]

    def add_loss() -> None:
        losses.append(module._module.kept[0].square().sum(1).mean())

    if kept_first:
        add_loss()
    else:  # autograd goes last to what a new thread has made
        thread = Thread(target=add_loss)
        thread.start()
        thread.join()
    with raises("FC414", match=r"b \(Linear\)"):
        torch.autograd.backward(losses)


def test_a_layer_by_itself_while_a_call_waits_is_refused() -> None:
    module, x = wrapped(), torch.randn(B, D, dtype=torch.float64)
    output = module(x)
    with raises("FC401", match=r"a \(Linear\)"):
        (output.square().sum(1) + module._module.a(x).square().sum(1)).mean().backward()


def test_after_a_refusal_that_is_kept_the_next_backward_is_whole() -> None:
    """Its frames hold the pass that was refused, which must not take the next one's gradients."""
    module = wrapped()
    x, other = torch.randn(2, B, D, dtype=torch.float64)
    module(x).square().sum(1).mean().backward()
    norms, expected = module.get_norm_sample(), [p.grad for p in module.parameters()]
    module.zero_grad(set_to_none=True)
    first = module(x)
    module(other)
    with raises("FC414", match="two_pass") as kept:
        module._module.kept[0].square().sum(1).mean().backward(retain_graph=True)
    assert kept.value.__traceback__ is not None
    first.square().sum(1).mean().backward()
    torch.testing.assert_close(module.get_norm_sample(), norms)
    for param, grad in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)


@pytest.mark.parametrize("name", CLOSED)
def test_closed_output_in_two_passes_is_refused(name: str) -> None:
    """What cannot be opened is named, with what was found there."""
    case = CASES[f"in a {name}"]
    model, batch = case.make()
    flash = GradSampleModuleFlashClipping(model, mode="two_pass")
    with raises("FC414|FC415", match=r"two_pass.*(function|set)"):
        case.losses(flash, batch).mean().backward()


def test_output_without_a_row_for_each_sample_in_two_passes_is_refused() -> None:
    model, batch = CASES[f"with_sigma, {D}"].make()
    with raises("FC418"):
        GradSampleModuleFlashClipping(model, mode="two_pass")(*batch)
