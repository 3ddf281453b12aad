"""What is attacked: a small model for every rule, whose gradients are planted.

A :class:`Subject` turns an :class:`~tests.certificate.attacks.Attack` into one sample: inputs, and
for every output of the model the gradient that it shall receive. The loss of a sample is
``sum(output * plant)``, so that whatever is planted is what arrives at the layer.

Shape suffixes: ``T`` positions, ``d`` input features, ``p`` output features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from opacus.layers import DPLSTM
from torch import Tensor, nn

from flash_clipping.layers import HyperConnections
from flash_clipping.layers.product_key_experts import ExpertTables
from tests.certificate.attacks import Attack, groups_of_ids, product_rows, sum_rows

#: Inputs of the model and gradients of its outputs, without a batch axis.
Sample = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]

VOCABULARY = 7


@dataclass(frozen=True)
class Subject:
    """A model for attacks of one shape, and how an attack becomes a sample of it.

    Attributes:
        make: the model, in fp32 on the CPU.
        sample: one sample in a dtype.
        algorithms: those that this rule can take; each is forced in turn.
        options: further options of the grad sample module.
        lengths: numbers of positions that fit.
    """

    make: Callable[[Attack], nn.Module]
    sample: Callable[[Attack, torch.dtype], Sample]
    algorithms: tuple[str, ...] = ("auto",)
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] | None = None


# -- models ---------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One matrix as a table and as a head, read by two inputs that can be chosen freely."""

    def __init__(self, width: int):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids), self.head(x)


class Readers(nn.Module):
    """Two layers that read one input."""

    def __init__(self, d: int, p: int):
        super().__init__()
        self.first, self.second = nn.Linear(d, p, bias=False), nn.Linear(d, p)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class Twice(nn.Module):
    """One layer at two places."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer(y)


class Folded(nn.Module):
    """Windows ``[B, W, T, d]`` folded into the batch for one layer."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Experts(ExpertTables):
    """Each expert passes on what it reads: rows of ``up`` receive the output's gradient."""

    def __init__(self, width: int):
        super().__init__(width, VOCABULARY, "relu")
        nn.init.constant_(self.down, 1 / width)


class Bag(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, width, mode="sum")

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.bag(ids, None, weights)


class Bare(nn.Module):
    """Parameters of the module itself: a product, a scale and a shift."""

    def __init__(self, d: int, p: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, p) * 0.1)
        self.scale = nn.Parameter(torch.ones(p))
        self.shift = nn.Parameter(torch.zeros(p))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, y * self.scale + self.shift


class SelfAttention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, d: int, p: int):
        super().__init__()
        self.rnn = DPLSTM(d, p, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Deep(nn.Module):
    """Two layers: what the first receives comes through the second."""

    def __init__(self, d: int, p: int):
        super().__init__()
        self.first, self.second = nn.Linear(d, 6), nn.Linear(6, p)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


# -- samples --------------------------------------------------------------------------------------


def linear(attack: Attack, dtype: torch.dtype) -> Sample:
    A, G = product_rows(attack, dtype)
    return (A,), (G,)


def readers(attack: Attack, dtype: torch.dtype) -> Sample:
    """The first reader's terms cancel; the second receives a little that does not."""
    A, G = product_rows(attack, dtype)
    little = torch.randn(G.shape, generator=attack.generator(), dtype=torch.float64)
    little[1:] = 0
    size = 3 * attack.bound / max(1e-30, A[0].double().norm().item() * little.norm().item())
    return (A,), (G, (little * min(size, 1e4)).to(dtype))


def twice(attack: Attack, dtype: torch.dtype) -> Sample:
    """Even positions at the first place, odd ones at the second: pairs cancel between uses."""
    A, G = product_rows(attack, dtype)
    even = len(A) // 2 * 2
    return (A[0:even:2], A[1:even:2]), (G[0:even:2], G[1:even:2])


def folded(attack: Attack, dtype: torch.dtype) -> Sample:
    (A0, A1), (G0, G1) = twice(attack, dtype)
    return (torch.stack([A0, A1]),), (torch.stack([G0, G1]),)


def patches(attack: Attack, dtype: torch.dtype, kernel: int = 2) -> Sample:
    """A 1d convolution whose patches, which do not overlap, are the rows of the attack."""
    A, G = product_rows(replace(attack, d=attack.d * kernel), dtype)
    x = A.view(attack.T, attack.d, kernel).transpose(0, 1).reshape(attack.d, -1)
    return (x,), (G.mT.contiguous(),)


def grouped(attack: Attack, dtype: torch.dtype) -> Sample:
    """A 2d convolution of two groups with a kernel of 1 x 1; the positions are a column."""
    A, G = product_rows(attack, dtype)
    x, g = A.mT.unsqueeze(-1), G.mT.unsqueeze(-1)
    return (torch.cat([x, x.flip(0)]),), (torch.cat([g, g]),)


def voxels(attack: Attack, dtype: torch.dtype) -> Sample:
    A, G = product_rows(attack, dtype)
    return (A.mT[:, :, None, None].contiguous(),), (G.mT[:, :, None, None].contiguous(),)


def overlapping(attack: Attack, dtype: torch.dtype) -> Sample:
    """A 3 x 3 convolution; output gradients lie in the null space of the patches."""
    side = max(2, round(attack.T**0.5))
    gen = attack.generator()
    x = torch.randn(1, side, side, generator=gen, dtype=torch.float64)
    seen = F.unfold(x[None], 3, padding=1)[0].mT  # [T, 9]
    G = torch.randn(side * side, attack.p, generator=gen, dtype=torch.float64)
    if attack.kind != "ordinary" and len(seen) > seen.shape[1]:
        G -= seen @ torch.linalg.lstsq(seen, G).solution
    if attack.left is not None:
        G += attack.remainder(dtype) * torch.randn(G.shape, generator=gen, dtype=torch.float64)
    log_a = min(attack.log_a, 4.0) if dtype == torch.float16 else attack.log_a
    x = x * 10.0**log_a
    terms = (seen.norm(dim=1) * 10.0**log_a * G.norm(dim=1)).max().clamp(min=1e-300)
    G = G * (attack.bound * 10.0**attack.log_product / terms)
    top = torch.finfo(dtype).max / 8
    G = G * min(1.0, top / max(G.abs().max().item(), 1e-300))
    return (x.to(dtype),), (G.mT.reshape(attack.p, side, side).to(dtype),)


def embedding(attack: Attack, dtype: torch.dtype) -> Sample:
    ids = groups_of_ids(attack, VOCABULARY, attack.generator())
    return (ids,), (sum_rows(attack, attack.d, dtype),)


def bag(attack: Attack, dtype: torch.dtype) -> Sample:
    """Weights of one id cancel; the bag's gradient is large."""
    gen = attack.generator()
    ids = groups_of_ids(attack, VOCABULARY, gen)
    weights = sum_rows(attack, 1, dtype)[:, 0]
    scale = 10.0 ** min(3.0, max(-3.0, -attack.log_a))
    return (ids, weights), ((torch.randn(attack.d, generator=gen) * scale).to(dtype),)


def experts(attack: Attack, dtype: torch.dtype) -> Sample:
    """Every position reads two rows, with weights of both signs; some read one row twice."""
    gen = attack.generator()
    ids = [groups_of_ids(attack, VOCABULARY, gen) for _ in range(2)]
    weights = torch.tensor([1.0, -1.0]).expand(attack.T, 2)
    x = torch.ones(attack.T, attack.d, dtype=dtype)
    G = sum_rows(attack, attack.d, dtype)
    return (x, torch.stack(ids, 1), weights.to(dtype)), (G,)


def tied(attack: Attack, dtype: torch.dtype) -> Sample:
    """The table's rows receive the opposite of what the head's do."""
    gen = attack.generator()
    A, G = product_rows(replace(attack, p=1), dtype)
    ids = groups_of_ids(attack, VOCABULARY, gen)
    place = int(ids[0])
    if attack.kind == "ordinary":
        A, G_head = product_rows(replace(attack, p=VOCABULARY), dtype)
        return (ids, A), (sum_rows(attack, attack.d, dtype), G_head)
    G_head = torch.zeros(attack.T, VOCABULARY, dtype=dtype)
    G_head[:, place] = G[:, 0]
    head = G_head.double().mT @ A.double()  # [V, d]
    count = torch.bincount(ids, minlength=VOCABULARY).clamp(min=1)
    rows = -(head / count[:, None])[ids]
    if attack.seed % 3 == 0:  # split unevenly: the rows cancel among themselves as well
        noise = torch.randn(rows.shape, generator=gen, dtype=torch.float64) * _top(rows)
        mean = torch.zeros_like(head).index_add_(0, ids, noise) / count[:, None]
        rows += noise - mean[ids]
    if attack.left is not None:
        left = attack.remainder(dtype) * _top(rows)
        rows += left * torch.randn(rows.shape, generator=gen, dtype=torch.float64)
    return (ids, A), (_within(rows, dtype), G_head)


def norm_layer(attack: Attack, dtype: torch.dtype, n: int | None = None) -> Sample:
    """Equal inputs at all positions, so that a scale's rows cancel where a shift's do."""
    gen = attack.generator()
    n = attack.d + 1 if n is None else n
    x = torch.randn(attack.T, n, generator=gen)
    if attack.kind not in ("ordinary", "range", "one"):
        x = x[:1].repeat(attack.T, 1)
        x += attack.remainder(dtype) * torch.randn(attack.T, n, generator=gen)
    scale = 10.0 ** min(4.0, max(-4.0, attack.log_a))
    return ((x * scale).to(dtype),), (sum_rows(attack, n, dtype),)


def channels(attack: Attack, dtype: torch.dtype) -> Sample:
    """For layers that see ``[channels, T]``."""
    (x,), (G,) = norm_layer(attack, dtype, n=4)
    return (x.mT.contiguous(),), (G.mT.contiguous(),)


def connections(attack: Attack, dtype: torch.dtype) -> Sample:
    """Two streams, equal at all positions where rows shall cancel; three outputs."""
    d = attack.d + 1
    (x,), (G,) = norm_layer(attack, dtype, n=2 * d)
    return (x.unflatten(-1, (2, d)),), (G[:, :d], G[:, d : d + 2], G[:, -4:].unflatten(-1, (2, 2)))


def bare(attack: Attack, dtype: torch.dtype) -> Sample:
    A, G = product_rows(attack, dtype)
    x = torch.randn(1, attack.p, generator=attack.generator()).repeat(attack.T, 1)
    return (A, x.to(dtype)), (G, sum_rows(attack, attack.p, dtype))


def modest(attack: Attack, dtype: torch.dtype) -> Sample:
    """For models with a forward of their own: the input keeps to where that is finite."""
    log_a = min(2.0, max(-6.0, attack.log_a))
    A, _ = product_rows(replace(attack, log_a=log_a, log_product=0.0), dtype)
    return (A,), (sum_rows(attack, attack.p, dtype),)


def attention(attack: Attack, dtype: torch.dtype) -> Sample:
    log_a = min(1.0, max(-6.0, attack.log_a))
    A, _ = product_rows(replace(attack, log_a=log_a, log_product=0.0), dtype)
    return (A,), (sum_rows(attack, attack.d, dtype),)


def _top(x: Tensor) -> float:
    return x.abs().max().item()


def _within(x: Tensor, dtype: torch.dtype) -> Tensor:
    top = torch.finfo(dtype).max / 8
    return x.clamp(-top, top).to(dtype)


# -- all of them ----------------------------------------------------------------------------------

#: How the norms of a linear map can be taken (:mod:`flash_clipping.ops.runtime.cost`).
ALGORITHMS = ("gram", "outer", "outer_store")
EVEN = (2, 2, 4, 6, 8, 16, 64)

SUBJECTS: dict[str, Subject] = {
    "Linear": Subject(lambda a: nn.Linear(a.d, a.p, bias=False), linear, ALGORITHMS),
    "Linear with bias": Subject(lambda a: nn.Linear(a.d, a.p), linear, ALGORITHMS),
    "Linear, one position": Subject(
        lambda a: nn.Linear(a.d, a.p), linear, ("rank_one",), lengths=(1,)
    ),
    "Linear, shared input": Subject(lambda a: Readers(a.d, a.p), readers, ALGORITHMS),
    "Linear, used twice": Subject(
        lambda a: Twice(nn.Linear(a.d, a.p)), twice, ALGORITHMS, lengths=EVEN
    ),
    "Linear, folded": Subject(
        lambda a: Folded(nn.Linear(a.d, a.p)),
        folded,
        ALGORITHMS,
        options={"folded_modules": ["layer"]},
        lengths=EVEN,
    ),
    "Conv1d": Subject(lambda a: nn.Conv1d(a.d, a.p, 2, stride=2), patches, ALGORITHMS),
    "Conv2d, groups": Subject(
        lambda a: nn.Conv2d(2 * a.d, 2 * a.p, 1, groups=2), grouped, ALGORITHMS
    ),
    "Conv2d, overlapping": Subject(
        lambda a: nn.Conv2d(1, a.p, 3, padding=1, bias=False),
        overlapping,
        ALGORITHMS,
        lengths=(16, 25, 36, 64),
    ),
    "Conv3d": Subject(lambda a: nn.Conv3d(a.d, a.p, 1), voxels, ALGORITHMS),
    "Embedding": Subject(lambda a: nn.Embedding(VOCABULARY, a.d), embedding),
    "EmbeddingBag": Subject(lambda a: Bag(a.d), bag),
    "Expert tables": Subject(lambda a: Experts(a.d), experts),
    "Tied embedding": Subject(lambda a: Tied(a.d), tied, ALGORITHMS),
    "LayerNorm": Subject(lambda a: nn.LayerNorm(a.d + 1), norm_layer),
    "RMSNorm": Subject(lambda a: nn.RMSNorm(a.d + 1), norm_layer),
    "GroupNorm": Subject(lambda a: nn.GroupNorm(2, 4), channels, lengths=(2, 3, 4, 8, 16, 64)),
    "InstanceNorm": Subject(
        lambda a: nn.InstanceNorm1d(4, affine=True), channels, lengths=(2, 3, 4, 8, 16, 64)
    ),
    "Hyper-connections": Subject(
        lambda a: HyperConnections(a.d + 1, 2, iterations=3), connections, lengths=(2, 4, 16)
    ),
    "MultiheadAttention": Subject(
        lambda a: SelfAttention(a.d), attention, ALGORITHMS, lengths=(2, 3, 4, 8, 16)
    ),
    "LSTM": Subject(lambda a: Recurrent(a.d, a.p), modest, ALGORITHMS, lengths=(2, 3, 4, 8)),
    "Bare parameters": Subject(lambda a: Bare(a.d, a.p), bare, ALGORITHMS),
    "Generic": Subject(lambda a: nn.Linear(a.d, a.p), linear, options={"force_functorch": True}),
    "Two layers": Subject(lambda a: Deep(a.d, a.p), modest, ALGORITHMS),
}
