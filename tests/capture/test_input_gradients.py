"""``torch.autograd.grad`` and ``backward(inputs=...)`` leave nothing where they were not asked."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.errors import raises
from tests.support.models import CASES, Case
from tests.support.oracle import assert_close, per_sample_truth

pytestmark = pytest.mark.without_gate

INPUT_CASES = ["linear_3d", "conv1d", "parameter_proxies", "generic", "layer_norm", "group_norm"]


def make(case: Case) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = case.make().double()
    (x,) = case.batch()
    return model, x.double().requires_grad_(True)


@pytest.mark.parametrize("way", ["grad", "inputs", "output"])
@pytest.mark.parametrize("name", INPUT_CASES)
def test_input_gradients_leave_nothing(name: str, way: str) -> None:
    """Clipped sums were in ``p.grad`` of all parameters; a step counted one backward more."""
    case = CASES[name]
    model, x = make(case)
    plain = copy.deepcopy(model)
    (expected,) = torch.autograd.grad(case.loss(plain, (x,)).mean(), x)
    truth = per_sample_truth(model, (x.detach(),), case.loss)
    bound = truth.norms.median().item()
    module = GradSampleModuleFlashClipping(model, max_grad_norm=bound, strict=False)
    loss = case.loss(module, (x,)).mean()
    if way == "grad":
        (found,) = torch.autograd.grad(loss, x, retain_graph=True)
        torch.testing.assert_close(found, expected)
    elif way == "inputs":
        loss.backward(inputs=[x], retain_graph=True)
        torch.testing.assert_close(x.grad, expected)
    else:
        output = module(x)
        torch.autograd.grad(output.square().sum(), output, retain_graph=True)
        del output
        loss = case.loss(module, (x,)).mean()
    assert all(param.grad is None for param in model.parameters())
    assert module.backward_count == 0
    with raises("FC525", match="yet"):
        module.get_norm_sample()
    loss.backward()  # the same graph, all of it
    assert module.backward_count == 1
    assert_close(module.get_norm_sample(), truth.norms, 1e-9, "norms")
    for name_, clipped in truth.clipped(bound).items():
        param = model.get_parameter(name_)
        assert_close(param.grad, clipped, 1e-9, name_)


@pytest.mark.parametrize("allow_unused", [True, False])
def test_parameters_in_autograd_grad_are_refused(allow_unused: bool) -> None:
    model, x = make(CASES["linear_3d"])
    module = GradSampleModuleFlashClipping(model)
    loss = CASES["linear_3d"].loss(module, (x,)).mean()
    for inputs in (list(model.parameters()), [x, next(model.parameters())]):
        with raises("FC411"):
            torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=allow_unused)
        assert all(param.grad is None for param in model.parameters())
    assert module.backward_count == 0


def test_only_the_named_parameters_get_sums() -> None:
    """By the norms of all that were passed: one sample moves them by the bound at most."""
    model, x = make(CASES["linear_3d"])
    truth = per_sample_truth(model, (x.detach(),), CASES["linear_3d"].loss)
    bound = truth.norms.median().item()
    module = GradSampleModuleFlashClipping(model, max_grad_norm=bound)
    loss = CASES["linear_3d"].loss(module, (x,)).mean()
    first = next(iter(model.named_parameters()))
    loss.backward(inputs=[first[1]])
    for name, param in model.named_parameters():
        if param is first[1]:
            assert_close(param.grad, truth.clipped(bound)[name], 1e-9, name)
        else:
            assert param.grad is None


def test_two_pass_refuses_input_gradients() -> None:
    model, x = make(CASES["linear_3d"])
    module = GradSampleModuleFlashClipping(model, mode="two_pass")
    with raises("FC416", match="use_reentrant=False"):
        module(x)
    CASES["linear_3d"].loss(module, (x.detach(),)).mean().backward()
    assert module.backward_count == 1


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_checkpointed_layers_are_asked_for(reentrant: bool, mode: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return checkpoint(self.second, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model, x = Checkpointed().double(), torch.randn(5, 4).double()
    truth = per_sample_truth(
        nn.Sequential(model.first, nn.Tanh(), model.second),
        (x,),
        lambda m, batch: m(*batch).square().sum(1),
    )
    module = GradSampleModuleFlashClipping(model, max_grad_norm=0.1, mode=mode)
    module(x).square().sum(1).mean().backward()
    assert_close(module.get_norm_sample(), truth.norms, 1e-9, "norms")
    assert all(param.grad is not None for param in model.parameters())
