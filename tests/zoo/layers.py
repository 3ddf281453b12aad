"""Layers: how they are called, what computes their weights, and forwards of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from flash_clipping import FlashClippingError
from tests.support.uses import IDS, D, Holder, T, attention_layer, make_around, seeded_batch
from tests.zoo.case import Batch, ModelCase, around

# -- calls ----------------------------------------------------------------------------------------


def beside_ids() -> Batch:
    return (*seeded_batch(), IDS)


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
    "linear": lambda: Holder(lambda m, x, i: m.layer(input=x), layer=nn.Linear(D, D)),
    "rms_norm": lambda: Holder(lambda m, x, i: m.layer(x=x), layer=nn.RMSNorm(D)),
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


# -- weights that are computed ---------------------------------------------------------------------


def without(layer: nn.Module, name: str = "weight") -> nn.Module:
    delattr(layer, name)
    return layer


def assigned(m: Any, x: Tensor, *ids: Tensor) -> Tensor:
    m.layer.weight = m.source.tanh()
    return m.layer(x)


def convolved(m: Any, x: Tensor) -> Tensor:
    return assigned(m, x.mT).mT


def looked_up(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + assigned(m, ids)


def plainly(m: Any, x: Tensor) -> Tensor:
    return m.layer(x)


def self_attention(m: Any, x: Tensor) -> Tensor:
    return m.layer(x, x, x)[0]


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "assigned": lambda: Holder(assigned, layer=without(nn.Linear(D, D)), source=torch.randn(D, D)),
    "convolution": lambda: Holder(
        convolved, layer=without(nn.Conv1d(D, D, 3, padding=1)), source=torch.randn(D, D, 3)
    ),
    "norm": lambda: Holder(assigned, layer=without(nn.LayerNorm(D)), source=torch.randn(D)),
    "embedding": lambda: Holder(
        looked_up, layer=without(nn.Embedding(7, D)), source=torch.randn(7, D)
    ),
    "attention_weight_norm": lambda: Holder(
        self_attention, layer=parametrizations.weight_norm(attention_layer(), "in_proj_weight")
    ),
    "weight_norm": lambda: Holder(plainly, layer=parametrizations.weight_norm(nn.Linear(D, D))),
}


# -- tables with a row that is not trained --------------------------------------------------------


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2


PADDED: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.Embedding(7, D, padding_idx=2),
    "subclass": lambda: Scaled(7, D, padding_idx=2),
    "function": lambda: Holder(
        lambda m, i: F.embedding(i, m.table, padding_idx=2) * m.v,
        table=torch.randn(7, D),
        v=torch.randn(D),
    ),
    "negative": lambda: Holder(lambda m, i: F.embedding(i, m.table, -5), table=torch.randn(7, D)),
    "aten": lambda: Holder(lambda m, i: torch.embedding(m.table, i, 2), table=torch.randn(7, D)),
    "bag": lambda: Holder(
        lambda m, i: F.embedding_bag(i, m.table, padding_idx=2, mode="sum")[:, None],
        table=torch.randn(7, D),
    ),
}


# -- cells in a loop ------------------------------------------------------------------------------


CELLS: dict[str, Callable[[], nn.RNNCellBase]] = {
    "lstm": lambda: nn.LSTMCell(D, D),
    "lstm_without_bias": lambda: nn.LSTMCell(D, D, bias=False),
    "gru": lambda: nn.GRUCell(D, D),
    "gru_without_bias": lambda: nn.GRUCell(D, D, bias=False),
    "tanh": lambda: nn.RNNCell(D, D),
    "relu": lambda: nn.RNNCell(D, D, bias=False, nonlinearity="relu"),
}

#: From the module and ``[B, T, D]`` to ``[B, D]``: what a loop begins with.
FIRST: dict[str, Callable[[Any, Tensor], Tensor | None]] = {
    "none": lambda m, x: None,
    "zeros": lambda m, x: x.new_zeros(len(x), D),
    "learnt": lambda m, x: m.first.expand(len(x), -1),
    "of_samples": lambda m, x: x.mean(1),
}


def looped(m: Any, x: Tensor) -> Tensor:
    """``[B, T, D]``: what the cell returns at every step."""
    is_lstm = isinstance(m.cell, nn.LSTMCell)
    state: Any = FIRST[m.begin](m, x)
    if is_lstm and state is not None:
        state = state, state
    outputs = []
    for x_Bd in x.unbind(1):
        state = m.cell(x_Bd, state)
        outputs.append(sum(state) if is_lstm else state)
    return torch.stack(outputs, 1)


def in_a_loop(cell: Callable[[], nn.Module], begin: str) -> Callable[[], nn.Module]:
    def middle() -> nn.Module:
        first = {"first": torch.randn(D)} if begin == "learnt" else {}
        return Holder(looped, cell=cell(), begin=begin, **first)

    return middle


def beside(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Holder(lambda m, x, i: x + m.layer(i), layer=layer())


def cases_of(
    group: str, middles: dict[str, Callable[[], nn.Module]], **options: Any
) -> dict[str, ModelCase]:
    return {
        f"{group} {name}": ModelCase(lambda middle=middle: make_around(middle), **options)
        for name, middle in middles.items()
    }


class Mine(nn.Embedding):
    """By another name."""


def keeping_to_a_norm(cls: Any, trainable: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = cls(7, 4, max_norm=0.1).requires_grad_(trainable)
        return nn.Sequential(nn.Sequential(layer), nn.Linear(4, 2))

    return build


#: Tables that their forward writes into.
MAX_NORM: dict[str, ModelCase] = {
    **{
        f"max_norm of {cls.__name__}, trainable {trainable}": ModelCase(
            keeping_to_a_norm(cls, trainable),
            lambda: (IDS,),
            refused="FC103",
            match=r"0\.0 .*max_norm=0\.1.*max_norm=None",
            kind=NotImplementedError,
        )
        for cls in (nn.Embedding, nn.EmbeddingBag, Mine)
        for trainable in (True, False)
    },
    **{
        f"max_norm in a function of {what}": around(
            lambda m, x, i: x + F.embedding(i, m.layer.weight, max_norm=0.1),
            lambda layer=layer: {"layer": layer()},
            batch=beside_ids,
            refused="FC103",
            kind=(NotImplementedError, FlashClippingError),
        )
        for what, layer in {
            "a trained table": lambda: nn.Embedding(7, D),
            "a frozen table": lambda: nn.Embedding(7, D).requires_grad_(False),
        }.items()
    },
    "max_norm in a function of its own table": around(
        lambda m, x, i: x + F.embedding(i, m.table, max_norm=0.1),
        lambda: {"table": torch.ones(7, D)},
        batch=beside_ids,
        refused="FC103",
    ),
}

CASES: dict[str, ModelCase] = {
    **MAX_NORM,
    **cases_of("call", CALLS, batch=beside_ids, without=("autocast",)),
    **cases_of("computed", {n: m for n, m in COMPUTED.items() if n != "embedding"}),
    **cases_of("computed", {"embedding": COMPUTED["embedding"]}, batch=beside_ids),
    **cases_of("padded", {n: beside(layer) for n, layer in PADDED.items()}, batch=beside_ids),
    **{
        name: case
        for number, begin in enumerate(FIRST)
        for name, case in cases_of(
            f"cell from {begin}",
            {n: in_a_loop(CELLS[n], begin) for n in [*CELLS][number % 2 :: 2]},
        ).items()
    },
}
