"""Layers that wrap another: what they do at each step is what counts, however they are run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import check_by_autograd, squares, truth_by_autograd
from tests.support.oracle import assert_close

pytestmark = pytest.mark.without_gate

B, T, D = 3, 4, 6


class Changing(nn.Linear):
    """A parent's forward, until an attribute, the mode, the input or a count says otherwise."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.factor = 1.0
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 6:
            return F.linear(torch.tanh(x), F.normalize(self.weight, dim=1), self.bias)
        if not self.training:
            return x * self.bias
        if x.shape[1] > T:
            return F.linear(x, self.weight.square(), self.bias)
        return super().forward(x) * self.factor


class Scale(nn.Module):
    """As an RMSNorm of Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Same(nn.Linear):
    """The parent's forward, and nothing else: as much as no forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def sequence(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), *layers, nn.Linear(D, 2)).double()
    for param in model.parameters():
        nn.init.normal_(param, std=0.6)
    return model


def test_another_forward_at_another_step() -> None:
    """Nothing was concluded from what it computed when the model was wrapped."""
    model = sequence(Changing())
    plain = copy.deepcopy(model)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    changing: Any = model[1]
    for factor, training, length in [
        (1, True, T),
        (-3, True, T),
        (1, False, T),
        (1, True, T + 2),
    ] * 2:
        torch.manual_seed(length)
        batch = (torch.randn(B, length, D, dtype=torch.float64),)
        changing.factor = factor
        flash.train(training)
        count = changing.calls
        model.zero_grad(set_to_none=True)
        squares(flash, batch).backward()
        plain[1].load_state_dict(changing.state_dict())
        plain[1].factor, plain[1].training = factor, training
        norms = []
        for b in range(B):  # the count of the call, not of the sample
            plain[1].calls = changing.calls - 1
            norms.append(truth_by_autograd(plain, (batch[0][b : b + 1],), squares).norms)
        assert changing.calls > count
        assert_close(
            flash.get_norm_sample(), torch.cat(norms), 1e-9, f"norms at {factor, training}"
        )
    assert changing.calls > 7


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_checkpointed(mode: str, reentrant: bool) -> None:
    class Block(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model = sequence(Block(Same(D, D), nn.Tanh(), Scale(), Scale()))
    check_by_autograd(model, (torch.randn(B, T, D).double(),), squares, mode=mode)


def test_tied_to_the_head_and_frozen() -> None:
    class Looked(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 3.0

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.frozen = Looked(9, D), Scale(), Same(D, D)
            self.head = nn.Linear(D, 9, bias=False)
            self.head.weight = self.embed.weight
            self.frozen.weight.requires_grad_(False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.frozen(self.norm(self.embed(ids)))))

    torch.manual_seed(0)
    check_by_autograd(Tied().double(), (torch.randint(0, 9, (B, T)),), squares)


@pytest.mark.parametrize("how", ["autocast", "bfloat16", "float32"])
def test_bitwise_as_the_parent(how: str) -> None:
    """In low precision too: the operands that were multiplied are those that are measured."""
    results = []
    for layer in (nn.Linear(D, D), Same(D, D)):
        # The layer comes first: under autocast it is what casts its input.
        model = sequence(layer)[1:].to(torch.bfloat16 if how == "bfloat16" else torch.float32)
        flash = GradSampleModuleFlashClipping(model, max_grad_norm=0.1)
        torch.manual_seed(1)
        x = torch.randn(B, T, D).to(next(model.parameters()).dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            output = flash(x)
        output.float().square().sum().backward()
        results.append([flash.get_norm_sample(), *[param.grad for param in model.parameters()]])
    for parents, ours in zip(*results, strict=True):
        assert torch.equal(parents, ours)


def test_in_place_after_it_and_a_changed_weight() -> None:
    model = sequence(Same(D, D), nn.ReLU(inplace=True), Scale())
    batch = (torch.randn(B, T, D).double(),)
    check_by_autograd(model, batch, squares)
    flash = GradSampleModuleFlashClipping(sequence(Same(D, D)), max_grad_norm=1.0)
    loss = squares(flash, batch)
    with torch.no_grad():
        flash._module[1].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:The gradient of at least one sample was not finite")
def test_a_sample_that_is_not_finite_harms_no_other() -> None:
    model = sequence(Same(D, D), Scale())
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, loss_reduction="sum")
    x = torch.randn(B, T, D).double()
    grads = []
    for value in (0.0, torch.inf):
        x[1] = value
        model.zero_grad(set_to_none=True)
        rows = flash(x)
        (rows[::2] if value == 0 else rows).square().sum().backward()
        grads.append([param.grad.clone() for param in model.parameters()])
    assert all(torch.isfinite(grad).all() for grad in grads[1])
    for without, beside in zip(*grads, strict=True):
        torch.testing.assert_close(without, beside)
