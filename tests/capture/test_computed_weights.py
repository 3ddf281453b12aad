"""Weights that something else computes: exact, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from flash_clipping import FlashClippingError, GradSampleModuleFlashClipping
from tests.support.autograd import squares
from tests.support.errors import raises
from tests.support.oracle import assert_close
from tests.support.uses import IDS, D, Holder, attention_layer, exact, make_around, seeded_batch
from tests.support.wrapping import WRAPPERS

pytestmark = pytest.mark.without_gate


def without(layer: nn.Module, name: str = "weight") -> nn.Module:
    delattr(layer, name)
    return layer


def assigned(m: Any, x: Tensor, *ids: Tensor) -> Tensor:
    m.layer.weight = m.source.tanh()
    return m.layer(x)


def in_dict(m: Any, x: Tensor) -> Tensor:
    vars(m.layer)["weight"] = m.source.tanh()
    return m.layer(x)


def shadowed(m: Any, x: Tensor) -> Tensor:
    vars(m.layer)["weight"] = m.source.tanh()
    try:
        return m.layer(x)
    finally:
        del vars(m.layer)["weight"]


def convolved(m: Any, x: Tensor) -> Tensor:
    return assigned(m, x.mT).mT


def looked_up(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + assigned(m, ids)


def attended(m: Any, x: Tensor) -> Tensor:
    m.layer.in_proj_weight = m.source.tanh()
    return m.layer(x, x, x)[0]


def with_none() -> nn.Module:
    layer = without(nn.Linear(D, D))
    layer.weight = None
    return layer


def with_buffer() -> nn.Module:
    layer = without(nn.Linear(D, D))
    layer.register_buffer("weight", torch.zeros(D, D))
    return layer


class ReadsAnother(nn.Linear):
    """Its weight is a property that computes it from a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.register_parameter("base", nn.Parameter(self._parameters.pop("weight")))

    @property
    def weight(self) -> Tensor:
        return torch.tanh(self.base)

    @weight.setter
    def weight(self, value: Any) -> None:
        self._parameters["weight"] = value


def self_attention(m: Any, x: Tensor) -> Tensor:
    return m.layer(x, x, x)[0]


def normed_output() -> nn.Module:
    layer = attention_layer()
    parametrizations.weight_norm(layer.out_proj)
    return layer


def plainly(m: Any, x: Tensor) -> Tensor:
    return m.layer(x)


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "assigned": lambda: Holder(assigned, layer=without(nn.Linear(D, D)), source=torch.randn(D, D)),
    "assigned_none": lambda: Holder(assigned, layer=with_none(), source=torch.randn(D, D)),
    "assigned_buffer": lambda: Holder(assigned, layer=with_buffer(), source=torch.randn(D, D)),
    "in_dict": lambda: Holder(in_dict, layer=without(nn.Linear(D, D)), source=torch.randn(D, D)),
    "shadowed": lambda: Holder(shadowed, layer=nn.Linear(D, D), source=torch.randn(D, D)),
    "convolution": lambda: Holder(
        convolved, layer=without(nn.Conv1d(D, D, 3, padding=1)), source=torch.randn(D, D, 3)
    ),
    "norm": lambda: Holder(assigned, layer=without(nn.LayerNorm(D)), source=torch.randn(D)),
    "embedding": lambda: Holder(
        looked_up, layer=without(nn.Embedding(7, D)), source=torch.randn(7, D)
    ),
    "attention": lambda: Holder(
        attended, layer=without(attention_layer(), "in_proj_weight"), source=torch.randn(3 * D, D)
    ),
    "property": lambda: Holder(plainly, layer=ReadsAnother()),
    "weight_norm": lambda: Holder(plainly, layer=parametrizations.weight_norm(nn.Linear(D, D))),
    "orthogonal": lambda: Holder(plainly, layer=parametrizations.orthogonal(nn.Linear(D, D))),
    "attention_weight_norm": lambda: Holder(
        self_attention, layer=parametrizations.weight_norm(attention_layer(), "in_proj_weight")
    ),
    "attention_output_weight_norm": lambda: Holder(self_attention, layer=normed_output()),
}


@pytest.mark.parametrize("mode, wrapper", [("one_pass", "wrapped"), ("two_pass", "hooks")])
@pytest.mark.parametrize("name", COMPUTED)
def test_computed_weight_is_exact(name: str, mode: str, wrapper: str) -> None:
    batch = (*seeded_batch(), IDS) if name == "embedding" else seeded_batch()
    exact(COMPUTED[name], batch, mode, wrapper)


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


@pytest.mark.parametrize("samples", range(1, 10))
def test_vectors_of_spectral_norm_as_long_as_the_batch(samples: int) -> None:
    """By their size they could be samples, in the batch or in the one that is compared with it."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 6))
    for layer in (plain[0], plain[3]):
        parametrizations.spectral_norm(layer).double()
    x = torch.randn(samples, 2, 2, 2, dtype=torch.float64)
    flash = GradSampleModuleFlashClipping(copy.deepcopy(plain), max_grad_norm=1.0)
    flash(x).square().sum(1).mean().backward()
    rows = plain(x).square().sum(1)
    grads = [torch.autograd.grad(row, list(plain.parameters()), retain_graph=True) for row in rows]
    norms = torch.stack([torch.cat([g.flatten() for g in of_one]).norm() for of_one in grads])
    assert_close(flash.get_norm_sample(), norms, 1e-9)


def test_a_buffer_is_written_of_samples_with_gradients_off() -> None:
    """Written by the same function, of a parameter and samples: refused, as any buffer is."""

    def noting(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.mul(m.gain, x.mean((0, 1)), out=m.seen)
        return x * m.gain

    model = make_around(lambda: Holder(noting, gain=torch.ones(D)))
    model.middle.register_buffer("seen", torch.zeros(D, dtype=torch.float64))
    with raises("FC130", (NotImplementedError, FlashClippingError), match="middle"):
        squares(WRAPPERS["wrapped"](model), seeded_batch()).backward()


HOOKED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", HOOKED)
def test_weight_of_a_hook_is_refused(name: str) -> None:
    model = make_around(lambda: Holder(plainly, layer=HOOKED[name](nn.Linear(D, D))))
    with raises("FC114", NotImplementedError, match=rf"middle\.layer .*hook .*{name}") as error:
        WRAPPERS["wrapped"](model)
    exec(str(error.value).splitlines()[-1].strip(), {"model": model, "torch": torch})
    squares(WRAPPERS["wrapped"](model), seeded_batch()).backward()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", HOOKED)
def test_a_frozen_weight_of_a_hook_is_none_of_ours(name: str) -> None:
    model = make_around(lambda: Holder(plainly, layer=HOOKED[name](nn.Linear(D, D))))
    model.middle.requires_grad_(False)
    squares(WRAPPERS["wrapped"](model, strict=False), seeded_batch()).backward()
    assert model.first.weight.grad is not None
