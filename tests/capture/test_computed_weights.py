"""Weights that something else computes: exact, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from flash_clipping import FlashClippingError
from tests.support.autograd import squares
from tests.support.uses import IDS, D, Holder, attention_layer, exact, make, seeded_batch
from tests.support.wrapping import WRAPPERS

pytestmark = pytest.mark.filterwarnings("ignore:.*vmap cannot run this module")


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


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "change",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ],
    ids=["weight_norm", "spectral_norm", "prune"],
)
def test_weight_of_a_hook_is_refused(change: Callable[[nn.Module], nn.Module]) -> None:
    model = make(lambda: Holder(plainly, layer=change(nn.Linear(D, D))))
    flash = WRAPPERS["wrapped"](model, strict=False)
    with pytest.raises(FlashClippingError, match=r"(?s)middle\.layer .*parametrizations"):
        squares(flash, seeded_batch()).backward()
