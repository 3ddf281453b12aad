"""Parameters that modules use themselves: what is refused, and what a step costs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from flash_clipping import (
    DenseGrad,
    FlashClippingError,
    GradSampleModuleFlashClipping,
    Rule,
    register_rule,
)
from flash_clipping.capture import proxies
from flash_clipping.rules import registry
from tests.support.autograd import squares, truth_by_autograd
from tests.support.errors import raises
from tests.support.oracle import assert_close
from tests.support.uses import (
    D,
    Holder,
    Scaling,
    make_around,
    seeded_batch,
)
from tests.support.wrapping import WRAPPERS
from tests.zoo.case import around
from tests.zoo.uses import CASES, USES, all_kinds

pytestmark = pytest.mark.without_gate


def test_complex_parameter_is_refused_and_leaves_the_model_as_it_was() -> None:
    model = make_around(lambda: Holder(lambda m, x: x * m.c.abs()))
    model.middle.c = nn.Parameter(torch.randn(D, dtype=torch.complex128))
    with raises("FC115", match=r"middle\.c"):
        WRAPPERS["wrapped"](model, strict=False)
    assert all("forward" not in vars(module) for module in model.modules())
    model.middle.c.requires_grad_(False)
    flash = WRAPPERS["wrapped"](model, strict=False)
    squares(flash, seeded_batch()).backward()
    model.middle.c.requires_grad_(True)
    with raises("FC115", match=r"middle\.c"):
        flash(*seeded_batch())


def test_use_past_all_functions_is_refused_in_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The net below the others: as if the look at the first forward's graph found nothing, and
    nobody had compared gradients."""
    monkeypatch.setattr("flash_clipping.capture.proof.gate.Gate.examine", lambda *_: None)
    monkeypatch.setattr("flash_clipping.capture.tap.refuse_bypassed", lambda *_: None)
    model = around(USES["autograd_function"], all_kinds).build()
    flash = WRAPPERS["wrapped"](model, strict=False)
    with raises("FC140", match=r"middle \(Holder\): .*autograd.Function"):
        squares(flash, seeded_batch()).backward()
    # What is computed from a parameter comes out as an ordinary tensor, by a mistake of ours.
    monkeypatch.setattr(proxies.ParameterProxy, "wrap", staticmethod(lambda value, *_: value))
    model = around(lambda m, x: x * m.v.exp(), all_kinds).build()
    flash = WRAPPERS["wrapped"](model, strict=False)
    with raises("FC140", match=r"middle \(Holder\)"):
        squares(flash, seeded_batch()).backward()


@pytest.mark.parametrize("name", ["class_token", "matrix", "positions", "twice", "temperature"])
def test_gradients_with_hooks_disabled_before_backward_are_ordinary(name: str) -> None:
    case = CASES[name]
    model, batch = case.make()
    case.losses(model, batch).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    module = GradSampleModuleFlashClipping(model)
    losses = case.losses(module, batch)
    module.disable_hooks()
    losses.sum().backward()
    for n, p in model.named_parameters():
        if n in expected:
            torch.testing.assert_close(p.grad, expected[n])


def test_autograd_function_in_a_later_step_is_refused() -> None:
    """The graph is looked at in the first forward; afterwards backward notices."""
    model, batch = around(lambda m, x: m.multiply(x, m.v), all_kinds).make()
    model.middle.multiply = torch.mul
    module = GradSampleModuleFlashClipping(model)
    squares(module, batch).backward()
    module.zero_grad(set_to_none=True)
    model.middle.multiply = Scaling.apply
    with raises("FC140", match=r"middle \(Holder\).*autograd.Function"):
        squares(module, batch).backward()


def plainly(m: Any, x: Tensor) -> Tensor:
    return m.layer(x)


def convolved_plainly(m: Any, x: Tensor) -> Tensor:
    return m.layer(x.mT).mT


SPECTRAL: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Holder(plainly, layer=parametrizations.spectral_norm(nn.Linear(D, D))),
    "convolution": lambda: Holder(
        convolved_plainly, layer=parametrizations.spectral_norm(nn.Conv1d(D, D, 3, padding=1))
    ),
}


@pytest.mark.parametrize("mode, wrapper", [("one_pass", "wrapped"), ("two_pass", "hooks")])
@pytest.mark.parametrize("name", SPECTRAL)
def test_spectral_norm_is_exact(name: str, mode: str, wrapper: str) -> None:
    """Its vectors are of the weight alone: one more power iteration in every forward."""
    plain, model = make_around(SPECTRAL[name]), make_around(SPECTRAL[name])
    batch = seeded_batch()
    flash = WRAPPERS[wrapper](model, max_grad_norm=1.0, mode=mode)
    for _ in range(3):
        before = copy.deepcopy(plain)
        plain(*batch)
        rows = []
        for row in batch[0].split(1):
            alone = copy.deepcopy(before)
            squares(alone, (row,)).backward()
            rows.append(torch.cat([p.grad.flatten() for p in alone.parameters()]))
        grads = torch.stack(rows)
        model.zero_grad(set_to_none=True)
        squares(flash if wrapper == "wrapped" else model, batch).backward()
        assert_close(flash.get_norm_sample(), grads.norm(dim=1), 1e-9, "norms")
        coefficients = (1 / (grads.norm(dim=1) + 1e-6)).clamp(max=1)
        sums = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert_close(sums, coefficients @ grads, 1e-8, "sums")
        found = dict(model.named_buffers())
        for key, vector in plain.named_buffers():
            assert type(found[key]) is Tensor
            torch.testing.assert_close(found[key], vector, rtol=0, atol=1e-12)
        with torch.no_grad():
            for own, other in zip(plain.parameters(), model.parameters(), strict=True):
                own += 0.1 * own.sin()
                other.copy_(own)


HOOKED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


def hooked(name: str) -> Callable[[], nn.Module]:
    return lambda: Holder(plainly, layer=HOOKED[name](nn.Linear(D, D)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", ["weight_norm", "prune"])
def test_weight_that_a_hook_computes_is_exact(name: str, mode: str) -> None:
    truth = truth_by_autograd(make_around(hooked(name)), seeded_batch(), squares)
    model, bound = make_around(hooked(name)), truth.norms.median().item()
    flash = WRAPPERS["wrapped"](model, max_grad_norm=bound, mode=mode)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        squares(flash, seeded_batch()).backward()
        assert_close(flash.get_norm_sample(), truth.norms, 1e-9)
        for key, total in truth.clipped(bound).items():
            assert_close(model.get_parameter(key).grad, total, 1e-8, key)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_vectors_that_a_hook_writes_are_refused() -> None:
    with raises("FC130", NotImplementedError, match=r"middle\.layer .*'weight_u'"):
        squares(WRAPPERS["wrapped"](make_around(hooked("spectral_norm"))), seeded_batch())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", HOOKED)
def test_weight_of_a_hook_that_is_frozen_is_supported(name: str) -> None:
    model = make_around(hooked(name))
    model.middle.requires_grad_(False)
    squares(WRAPPERS["wrapped"](model, strict=False), seeded_batch()).backward()
    assert model.first.weight.grad is not None


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor, shift: Any = None, *, scale: float = 1.0) -> Tensor:
        return x * self.gain * scale + (0 if shift is None else shift)


class GainRule(Rule):
    def forward(self, layer: Any, x: Tensor, shift: Any = None) -> tuple[Tensor, tuple[Any, ...]]:
        return x * layer.gain + (0 if shift is None else shift), (x, layer.gain)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: Any) -> Any:
        x, gain = saved
        return grad_output * gain, {"gain": DenseGrad((grad_output * x).sum(1))}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m, x: m.layer(x, scale=2.0), r"middle\.layer \(Gain\): .*'scale'"),
        (lambda m, x: m.layer(x, shift=x), r"middle\.layer \(Gain\): .*no gradient for input 1"),
        (lambda m, x: m.layer(x, [x]), r"middle\.layer \(Gain\): .*a list of tensors"),
    ],
    ids=["keyword", "input", "list"],
)
def test_argument_that_a_rule_does_not_take_is_refused(
    call: Callable[[Any, Tensor], Tensor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_RULES", registry._RULES.copy())
    register_rule(Gain)(GainRule)
    model = make_around(lambda: Holder(call, layer=Gain()))
    flash = WRAPPERS["wrapped"](model)
    with raises("FC161|FC163", match=message):
        squares(flash, seeded_batch()).backward()


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
def test_max_norm_that_is_set_later_is_refused(cls: Any, trainable: bool) -> None:
    layer = cls(5, 4).requires_grad_(trainable)
    before = layer.weight.detach().clone()
    model = GradSampleModuleFlashClipping(nn.ModuleDict({"e": layer, "h": nn.Linear(4, 2)}))
    model._module.forward = lambda ids: model._module["h"](model._module["e"](ids))
    layer.max_norm = 0.1
    with raises("FC103", (NotImplementedError, FlashClippingError), match=r"max_norm=0\.1"):
        model(torch.tensor([[1, 2], [3, 4]]))
    assert torch.equal(layer.weight, before)
