"""Layers that wrap another: over time, where rows are no samples, and compiled.

Wherever such a layer is not supported it is refused by its name, never measured by another rule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.compiled.regions import Region
from tests.capture.test_packed import check
from tests.support.autograd import check_truth, squares, truth_by_autograd
from tests.support.compiled import Backend, slow
from tests.support.errors import raises
from tests.support.oracle import assert_close
from tests.support.packed import Reader, documents
from tests.zoo.declared import Experts
from tests.zoo.spelled import (
    CASES,
    B,
    Convolution,
    D,
    Norm,
    SpeltLinear,
    T,
    gated,
    hat,
)

pytestmark = pytest.mark.without_gate


Make = Callable[[], nn.Module]


def llama() -> nn.Module:
    return Norm(lambda m, x: m.weight * hat(m, x) + m.bias)


def mixing_places(m: SpeltLinear, x: Tensor) -> Tensor:
    """A linear map of what stands before, too: one document's gradient has another's values."""
    return F.linear(x + x.roll(1, -2), m.weight, m.bias)


BETWEEN: dict[str, Make] = {
    "linear": lambda: SpeltLinear(lambda m, x: F.linear(x, m.weight, m.bias) * m.gain),
    "falcon": lambda: SpeltLinear(lambda m, x: x @ m.weight.T + m.bias),
    "scaled_by_itself": lambda: SpeltLinear(
        lambda m, x: F.linear(x, m.weight, m.bias) * m.weight.sum()
    ),
    "llama": llama,
    "layer_norm": lambda: Norm(lambda m, x: F.layer_norm(x, (D,), m.weight, m.bias, m.eps)),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_documents_in_one_row_of_a_wrapped_layer_are_exact(name: str) -> None:
    check(Reader(BETWEEN[name]()).double(), [list(enumerate(documents()))])


def test_documents_in_rows_of_a_wrapped_layer_are_exact() -> None:
    a, b, c = documents((3, 4, 2))
    check(Reader(llama()).double(), [[(0, a), (1, b)], [(1, c)]])


REFUSED: dict[str, tuple[Make, str]] = {
    "mixing_places": (lambda: SpeltLinear(mixing_places), r"between \(SpeltLinear\).*position by"),
    "gated": (
        lambda: Norm(lambda m, x: gated(m, x) + m.bias),
        r"between \(Norm\).*position by position",
    ),
    "convolution": (
        lambda: Convolution(False),
        r"between \(Convolution\).*position by position",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layer_that_mixes_documents_is_refused(name: str) -> None:
    make, found = REFUSED[name]
    with raises("FC278", match=found):
        check(Reader(make()).double(), [list(enumerate(documents()))])


@pytest.mark.parametrize("make", [BETWEEN["linear"], BETWEEN["falcon"], llama])
def test_wrapped_layer_inside_of_samples_is_refused(make: Make) -> None:
    flash = GradSampleModuleFlashClipping(Experts(make))
    with raises("FC264", match=r"experts\.0 \(.*."):
        squares(flash, (torch.randn(3, 5, 6),)).backward()


COMPILED = ["embedding_scaled", slow("linear_twice"), "norm_gemma", slow("norm_enlarged")]


@pytest.mark.parametrize("name", COMPILED)
def test_wrapped_layer_compiled_is_exact(name: str, nothing_compiled_yet: None) -> None:
    """The layer stands inside of what is compiled, and its neighbours too."""
    model, batch = CASES[name].make()
    truth = truth_by_autograd(copy.deepcopy(model), batch, squares)
    bound, backend = truth.norms.median().item(), Backend()
    model.compile(backend=backend)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=bound)
    for _ in range(2):
        flash.zero_grad(set_to_none=True)
        squares(flash, batch).backward()
        check_truth(flash, model, truth, bound, 1e-9)
    assert isinstance(flash._taps.of_root.instance_forward, Region)
    assert backend.graphs


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


def test_another_forward_at_another_step_is_exact() -> None:
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


@pytest.mark.parametrize("how", ["autocast", "bfloat16", "float32"])
def test_wrapped_layer_in_16_bits_equals_its_parent(how: str) -> None:
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
