"""What a layer with a rule is called with: read, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import DenseGrad, Rule, register_rule
from flash_clipping.rules import registry
from tests.support.autograd import squares
from tests.support.errors import raises
from tests.support.uses import IDS, D, Holder, T, attention_layer, exact, make_around, seeded_batch
from tests.support.wrapping import MODES, WRAPPERS

pytestmark = pytest.mark.without_gate


def bags(**options: Any) -> nn.Module:
    return nn.EmbeddingBag(7, D, **options)


def starts(ids: Tensor) -> Tensor:
    return torch.arange(len(ids)) * T


def weights_of(ids: Tensor) -> Tensor:
    return torch.linspace(0.2, 1.7, T, dtype=torch.float64) * (1 + ids)


def masked_attention(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    mask = (ids == 1) & (torch.arange(T) > 0)
    return m.layer(value=x, query=x, key=x * 2, key_padding_mask=mask, need_weights=False)[0]


CALLS: dict[str, Callable[[], nn.Module]] = {
    "weights": lambda: Holder(
        lambda m, x, i: x + m.layer(i, per_sample_weights=weights_of(i))[:, None],
        layer=bags(mode="sum"),
    ),
    "offsets": lambda: Holder(
        lambda m, x, i: x + m.layer(i.reshape(-1), offsets=starts(i))[:, None], layer=bags()
    ),
    "all_of_a_bag": lambda: Holder(
        lambda m, x, i: (
            x
            + m.layer(
                per_sample_weights=weights_of(i).reshape(-1),
                offsets=starts(i),
                input=i.reshape(-1),
            )[:, None]
        ),
        layer=bags(mode="sum", padding_idx=2),
    ),
    "linear": lambda: Holder(lambda m, x, i: m.layer(input=x), layer=nn.Linear(D, D)),
    "norm": lambda: Holder(lambda m, x, i: m.layer(input=x), layer=nn.LayerNorm(D)),
    "rms_norm": lambda: Holder(lambda m, x, i: m.layer(x=x), layer=nn.RMSNorm(D)),
    "convolution": lambda: Holder(
        lambda m, x, i: m.layer(input=x.mT).mT, layer=nn.Conv1d(D, D, 3, padding=1)
    ),
    "embedding": lambda: Holder(lambda m, x, i: x + m.layer(input=i), layer=nn.Embedding(7, D)),
    "attention": lambda: Holder(masked_attention, layer=attention_layer()),
    "learned_keys": lambda: Holder(
        lambda m, x, i: m.layer(
            x, m.key.expand(len(x), -1, -1), value=m.key.expand(len(x), -1, -1)
        )[0],
        layer=attention_layer(),
        key=torch.randn(1, 3, D),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_arguments_by_name_are_not_lost(name: str, mode: str) -> None:
    exact(CALLS[name], (*seeded_batch(), IDS), mode, "wrapped")


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
def test_what_a_rule_does_not_take_is_refused(
    call: Callable[[Any, Tensor], Tensor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_RULES", registry._RULES.copy())
    register_rule(Gain)(GainRule)
    model = make_around(lambda: Holder(call, layer=Gain()))
    flash = WRAPPERS["wrapped"](model)
    with raises("FC161|FC163", match=message):
        squares(flash, seeded_batch()).backward()
