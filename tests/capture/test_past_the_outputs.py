"""``mode="two_pass"`` and gradients that were not asked for."""

from __future__ import annotations

import copy
from threading import Thread

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.errors import raises
from tests.support.models import CASES as CASES_of_input_gradients, Case
from tests.support.oracle import assert_close, per_sample_truth
from tests.zoo.outputs import CASES, CLOSED

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
    case = CASES_of_input_gradients[name]
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
    model, x = make(CASES_of_input_gradients["linear_3d"])
    module = GradSampleModuleFlashClipping(model)
    loss = CASES_of_input_gradients["linear_3d"].loss(module, (x,)).mean()
    for inputs in (list(model.parameters()), [x, next(model.parameters())]):
        with raises("FC411"):
            torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=allow_unused)
        assert all(param.grad is None for param in model.parameters())
    assert module.backward_count == 0


def test_only_the_named_parameters_get_sums() -> None:
    """By the norms of all that were passed: one sample moves them by the bound at most."""
    model, x = make(CASES_of_input_gradients["linear_3d"])
    truth = per_sample_truth(model, (x.detach(),), CASES_of_input_gradients["linear_3d"].loss)
    bound = truth.norms.median().item()
    module = GradSampleModuleFlashClipping(model, max_grad_norm=bound)
    loss = CASES_of_input_gradients["linear_3d"].loss(module, (x,)).mean()
    first = next(iter(model.named_parameters()))
    loss.backward(inputs=[first[1]])
    for name, param in model.named_parameters():
        if param is first[1]:
            assert_close(param.grad, truth.clipped(bound)[name], 1e-9, name)
        else:
            assert param.grad is None


def test_two_pass_refuses_input_gradients() -> None:
    model, x = make(CASES_of_input_gradients["linear_3d"])
    module = GradSampleModuleFlashClipping(model, mode="two_pass")
    with raises("FC416", match="use_reentrant=False"):
        module(x)
    CASES_of_input_gradients["linear_3d"].loss(module, (x.detach(),)).mean().backward()
    assert module.backward_count == 1


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_parameters_that_backward_does_not_reach_have_sums_of_zeros(mode: str) -> None:
    """A step adds noise to them as well: whether samples use a layer says something of these."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(D, 2), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.used(x), self.unused(x)

    module = GradSampleModuleFlashClipping(Heads(), mode=mode)  # type: ignore[arg-type]
    used, _ = module(torch.randn(B, D))
    used.square().sum().backward()
    heads = module._module
    assert all(p.grad is not None and not p.grad.any() for p in heads.unused.parameters())
    assert all(p.grad is not None and p.grad.any() for p in heads.used.parameters())
