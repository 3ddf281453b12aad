"""``with samples(index, count=B)``: layers that read rows of any samples, in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import samples
from tests.zoo.case import ModelCase
from tests.zoo.shared import held, ids, rows


def right(x: Tensor) -> Tensor:
    """The sample of each row of ``x.flatten(0, 1)``."""
    return torch.arange(len(x)).repeat_interleave(x.shape[1])


class Experts(nn.Module):
    """A list of experts; each gets the tokens that chose it."""

    def __init__(self, make: Any = None, experts: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        make = make or (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)))
        self.before, self.router = nn.Linear(6, 6), nn.Linear(6, experts)
        self.experts = nn.ModuleList(make() for _ in range(experts))
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.before(x))
        B, T, d = hidden.shape
        weights, chosen = self.router(hidden).flatten(0, 1).softmax(-1).topk(2, -1)
        tokens = hidden.flatten(0, 1)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            token, place = torch.where(chosen == e)
            y = self.run(expert, tokens[token], token // T, B)
            out = out.index_add(0, token, y * weights[token, place, None])
        return self.last(hidden + out.view(B, T, d))

    def run(self, expert: nn.Module, x: Tensor, index: Tensor, B: int) -> Tensor:
        with samples(index, count=B):
            y: Tensor = expert(x)
        return y


class CheckpointedExperts(Experts):
    def run(self, expert: nn.Module, x: Tensor, index: Tensor, B: int) -> Tensor:
        y: Tensor = checkpoint(super().run, expert, x, index, B, use_reentrant=False)
        return y


class OneExpert(Experts):
    """A parameter with several uses, each with rows of its own."""

    def run(self, expert: nn.Module, x: Tensor, index: Tensor, B: int) -> Tensor:
        return super().run(self.experts[0], x, index, B)


def outside(reentrant: bool) -> Callable[..., Tensor]:
    """A checkpoint inside of ``samples``: the layer runs again outside of it."""

    def use(m: Any, x: Tensor) -> Tensor:
        found = m.first(x).flatten(0, 1)
        with samples(right(x).flip(0), count=len(x)):
            y: Tensor = checkpoint(m.layer, found.flip(0), use_reentrant=reentrant)
        return y.flip(0).view_as(x)

    return use


def changed_afterwards(m: Any, x: Tensor) -> Tensor:
    index = right(x)
    found = torch.tanh(m.first(x)).flatten(0, 1)
    with samples(index, count=len(x)):
        y: Tensor = m.layer(found)
    index.zero_()
    return y.view(len(x), -1)


def tables_read_twice(m: Any, ids: Tensor) -> Tensor:
    """Each time by rows of its own, of which some are of none."""
    B, T = ids.shape
    y = m.head(m.norm(m.table(ids))).mean(1)
    place = torch.arange(B * T) % T
    for keep in (place % 3 > 0, place % 2 > 0):
        with samples(torch.where(keep, right(ids), -1), count=B):
            found = m.norm(m.table(ids.flatten()))
        y = y + (found * keep[:, None]).view(B, T, -1).sum(1)[:, :3]
    return y


def any_rows(m: Any, x: Tensor) -> Tensor:
    """Rows of samples in any order, some of none."""
    B, T, _ = x.shape
    order = torch.argsort(torch.sin(torch.arange(B * T) * 1.7))
    index = torch.where(torch.arange(B * T) % T == 2, -1, right(x))[order]
    found = torch.tanh(m.before(x)).flatten(0, 1)[order]
    with samples(index, count=B):
        y: Tensor = m.layer(found.unflatten(1, (-1, 4)))
    y = y.flatten(1) * (index >= 0)[:, None]  # of none: nothing comes of it
    return torch.zeros(B, y.shape[1], dtype=y.dtype).index_add(0, index.clamp(min=0), y)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "layer norm": lambda: nn.LayerNorm(4),
    "convolution": lambda: nn.Conv1d(3, 2, 3),
    "group norm": lambda: nn.GroupNorm(3, 3),
}


def bias_alone() -> nn.Module:
    layer = nn.Linear(4, 3)
    layer.weight.requires_grad_(False)
    return layer


def declared(index: Callable[[Tensor], Any], count: Any = None) -> Callable[..., Tensor]:
    def use(m: Any, x: Tensor) -> Tensor:
        found = m.first(x).flatten(0, 1)
        with samples(index(x), count=len(x) if count is None else count):
            return m.layer(found).view(len(x), -1)

    return use


def two_layers() -> dict[str, Any]:
    return {"first": nn.Linear(6, 6), "layer": nn.Linear(6, 3)}


WRONG: dict[str, tuple[Callable[[Tensor], Any], Any, str]] = {
    "beyond": (lambda x: right(x) + 1, None, r"outside of -1 to 2"),
    "short": (lambda x: right(x)[1:], None, r"layer \(Linear\).* index has 14 entries"),
    "floats": (lambda x: right(x).float(), None, r"expected one integer for each row"),
    "list": (lambda x: [0] * 15, None, r"found list"),
    "count of another batch": (right, 7, r"layer \(Linear\).*a batch of 3 samples"),
    "count that is a float": (right, 3.0, r"count=3.0"),
    "meta": (lambda x: right(x).to("meta"), None, r"meta"),
}

#: PyTorch does not compile these, and a map of units is of whole rows.
INSIDE = ("checkpointed", "compiled", "functorch")
CASES: dict[str, ModelCase] = {
    **{
        f"experts {shape}": ModelCase(Experts, rows(*shape, 6), without=INSIDE)
        for shape in ((1, 7), (4, 1), (3, 5))
    },
    "more experts than rows": ModelCase(lambda: Experts(experts=20), rows(2, 2, 6), without=INSIDE),
    "checkpointed experts": ModelCase(CheckpointedExperts, rows(3, 5, 6), without=INSIDE),
    "one expert for all": ModelCase(OneExpert, rows(3, 5, 6), without=INSIDE),
    **{
        f"a checkpoint inside, {T} positions": held(
            outside(False),
            lambda: {"first": nn.Linear(6, 6), "layer": nn.Linear(6, 6)},
            batch=rows(3, T, 6),
            without=INSIDE,
        )
        for T in (1, 4)
    },
    "index that is changed": held(
        changed_afterwards, two_layers, batch=rows(3, 5, 6), without=INSIDE
    ),
    "tables read twice": held(
        tables_read_twice,
        lambda: {
            "table": nn.Embedding(7, 6, padding_idx=2),
            "norm": nn.LayerNorm(6),
            "head": nn.Linear(6, 3),
        },
        batch=ids(4, 5, 7),
        without=INSIDE,
    ),
    **{
        f"any rows of {name}": held(
            any_rows,
            lambda layer=layer: {"before": nn.Linear(6, 12), "layer": layer()},
            batch=rows(3, 4, 6),
            without=INSIDE,
            always=("units",),
        )
        for name, layer in (LAYERS | {"a bias alone": bias_alone}).items()
    },
    **{
        f"wrong index, {name}": held(
            declared(index, count),
            two_layers,
            batch=rows(3, 5, 6),
            refused="FC260",
            match=match,
        )
        for name, (index, count, match) in WRONG.items()
    },
    "a layer without a rule": held(
        declared(right),
        lambda: (
            two_layers()
            | {"layer": held(lambda m, x: x * m.v, lambda: {"v": torch.ones(6)}).build()}
        ),
        batch=rows(3, 5, 6),
        refused="FC264",
        match=r"layer \(Holder\)",
    ),
}
