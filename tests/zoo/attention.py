"""Attention: masks that come from parameters, and layers that read one input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import ModelCase
from tests.zoo.shared import held, rows

# -- layers that read one input -------------------------------------------------------------------


class Readers(nn.Module):
    """Three layers and more that read one input, between two of others."""

    def __init__(self, width: int = 6, readers: int = 3, layer: type[nn.Linear] = nn.Linear):
        super().__init__()
        self.before = nn.Linear(4, width)
        self.readers = nn.ModuleList(layer(width, 5) for _ in range(readers))
        self.after = nn.Linear(5, 3)
        self.use: Callable[[Tensor, nn.ModuleList], Tensor] = all_of_them

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.use(torch.tanh(self.before(x)), self.readers))


def all_of_them(x: Tensor, readers: nn.ModuleList) -> Tensor:
    return torch.stack([torch.sin(reader(x)) for reader in readers]).prod(0)


def in_heads(x: Tensor, readers: nn.ModuleList) -> Tensor:
    return torch.stack([reader(x).view(*x.shape[:-1], 5, 1).mT for reader in readers]).prod(0)[
        ..., 0, :
    ]


def beside_others(x: Tensor, readers: nn.ModuleList) -> Tensor:
    """Something that is no tapped layer reads the input too, before and between."""
    first = readers[0](x) * x.sum(-1, keepdim=True)
    return first + readers[1](x) * readers[2](x).sigmoid() + x.square().mean(-1, keepdim=True)


def changed_between(x: Tensor, readers: nn.ModuleList) -> Tensor:
    x = x * 1.5
    first = readers[0](x * 1)
    x.mul_(2)
    second = readers[1](x * 1)
    return first * second * readers[2](x)


def first_unused(x: Tensor, readers: nn.ModuleList) -> Tensor:
    unused = readers[0](x)
    product = readers[1](x) * readers[2](x)
    del unused
    return product


def one_twice(x: Tensor, readers: nn.ModuleList) -> Tensor:
    return readers[0](x) * readers[1](x) * readers[0](x) + readers[2](x)


def in_no_grad_between(x: Tensor, readers: nn.ModuleList) -> Tensor:
    first = readers[0](x)
    with torch.no_grad():
        readers[1](x)
    return first * readers[2](x)


USES = [
    all_of_them,
    in_heads,
    beside_others,
    changed_between,
    first_unused,
    one_twice,
    in_no_grad_between,
]


def reading(use: Callable[..., Tensor] = all_of_them, **options: Any) -> Readers:
    model = Readers(**options)
    model.use = use
    return model


# -- biases by relative position ------------------------------------------------------------------


B, T, HEADS = 3, 5, 2


class Biased(nn.Module):
    """Self-attention of ``[B, T, 4]`` with a table of biases of pairs of positions.

    Args:
        dropout: of attention.
        padded: a mask of each sample's own is added to the biases.
        frozen: maps to queries, keys and values are frozen.
    """

    def __init__(self, dropout: float = 0.3, padded: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.maps = nn.Linear(4, 12).requires_grad_(not frozen)
        self.table = nn.Parameter(torch.randn(HEADS, 2 * T - 1))
        self.dropout, self.padded = dropout, padded

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, 2)).movedim(2, 0).transpose(2, 3)
        apart = torch.arange(T)[:, None] - torch.arange(T) + T - 1
        mask = self.table[:, apart.to(x.device)].unsqueeze(0)
        if self.padded:  # the longer a sample's first number, the more of it is padding
            count = (x.detach()[:, 0, 0].abs() * 2).long().clamp(max=T - 1)
            hidden = torch.arange(T, device=x.device) < count[:, None]
            mask = mask + hidden[:, None, None, :].to(x.dtype) * -1e4
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0
        )
        return out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """An ordinary layer, attention, and a head; ``checkpointed``: attention runs again."""

    def __init__(self, checkpointed: bool = False, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.attention = Biased(**options)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        if self.checkpointed:
            x = checkpoint(self.attention, x, use_reentrant=False)
        else:
            x = self.attention(x)
        return self.head(x)


class Latents(Model):
    """Queries that are parameters, or computed from these, read what is of the samples."""

    def __init__(self, expanded: bool) -> None:
        super().__init__()
        self.latents, self.expanded = nn.Parameter(torch.randn(1, HEADS, 2, 2)), expanded

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.tanh(self.embed(x)).unflatten(-1, (HEADS, 2)).transpose(1, 2)
        queries = self.latents.expand(len(x), -1, -1, -1) if self.expanded else self.latents
        return self.head(
            F.scaled_dot_product_attention(
                query=queries, key=keys, value=keys, dropout_p=0.3 if self.training else 0.0
            )
            .transpose(1, 2)
            .flatten(2)
        )


def only_biases() -> nn.Module:
    """CUDA's kernels save nothing for their backward where neither queries, keys nor values need a
    gradient."""
    model = Model(frozen=True)
    model.embed.requires_grad_(False)
    return model


class Scores(nn.Module):
    """Heads' biases of pairs of positions, looked up once and added to the scores of each layer.

    Args:
        rows: of the table; with few of them, each is read at many pairs.
        mask: how what a sample may not attend to is left out: of the biases, before they are added
            (``"causal"``, ``"filled"`` and ``"named"``, the same for all samples, ``"expanded"``,
            which has a row for each of them, ``"where"``, ``"added"``, each sample's own), or not
            at all.
        fused: attention is one function, which gets the biases as its mask.
    """

    def __init__(self, rows: int, mask: str = "", layers: int = 3, fused: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, HEADS, padding_idx=1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.mask, self.fused = mask, fused

    def forward(self, x: Tensor) -> Tensor:
        apart = (torch.arange(T)[:, None] - torch.arange(T)).abs() % self.table.num_embeddings
        bias = self.table(apart.to(x.device)).permute(2, 0, 1).unsqueeze(0)
        hidden = (x.detach()[..., 0] < -1)[:, None, None, :]
        for layer in self.layers:
            q = layer(x).unflatten(-1, (HEADS, 2)).transpose(1, 2)
            mask, seen = bias, torch.ones(T, T).tril().bool().view(1, 1, T, T)
            if self.mask == "causal":
                mask = torch.where(seen, bias, -0.5)  # which the table must not get
            elif self.mask == "filled":
                mask = bias.masked_fill(~seen, -0.5)
            elif self.mask == "named":
                mask = torch.where(~seen, other=bias, input=bias.new_tensor(-0.5))
            elif self.mask == "expanded":  # as transformers writes masks out for CUDA graphs
                mask = torch.where(seen.expand(len(x), -1, -1, -1), bias, -0.5)
            elif self.mask == "where":
                mask = torch.where(hidden, -1e4, bias)
            elif self.mask == "added":
                mask = bias + hidden.to(x.dtype) * -1e4
            if self.fused:
                out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=1.0)
            else:
                out = torch.softmax(q @ q.mT + mask, -1) @ q
            x = x + out.transpose(1, 2).flatten(2)
        return x


def changed_between_layers(m: Any, x: Tensor) -> Tensor:
    """Biases that are changed in place are no rows of the table any more."""
    bias = F.embedding(torch.arange(T), m.table).unsqueeze(0)
    x = m.map(x) + bias
    bias.mul_(3)
    return torch.tanh(x) + bias


MASKS = ("", "causal", "filled", "named", "expanded", "where", "added")
CASES: dict[str, ModelCase] = {
    **{
        f"readers, {use.__name__}": ModelCase(lambda use=use: reading(use), rows(4, 7, 4))
        for use in USES
    },
    **{
        f"biases with dropout, padded {padded}, checkpointed {checkpointed}": ModelCase(
            lambda padded=padded, checkpointed=checkpointed: Model(checkpointed, padded=padded),
            rows(B, T, 3),
            draws=True,
            always=("two_pass",),
        )
        for padded, checkpointed in ((False, True), (True, False))
    },
    **{
        f"queries that are parameters, expanded {expanded}": ModelCase(
            lambda expanded=expanded: Latents(expanded), rows(B, T, 3), draws=True
        )
        for expanded in (True, False)
    },
    "biases alone": ModelCase(only_biases, rows(B, T, 3), draws=True),
    **{
        f"shared biases, {count} rows, mask {mask}": ModelCase(
            lambda count=count, mask=mask, fused=fused: Scores(count, mask, fused=fused),
            rows(B, T, 4),
        )
        for count, fused, masks in (
            (2, False, MASKS),
            (5, True, MASKS[::3]),
        )
        for mask in masks
    },
    "a table that changes between layers": held(
        changed_between_layers,
        lambda: {"table": torch.randn(5, 4), "map": nn.Linear(4, 4)},
        batch=rows(B, T, 4),
    ),
}
