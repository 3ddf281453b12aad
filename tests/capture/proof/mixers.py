"""Models that mix samples, or book a gradient to the wrong one; and models that do not.

Each is a function of a model and of what its first layer returned, ``[B, T, d]``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Inner = Callable[[Any, Tensor], Tensor]

#: Samples, positions, inputs and features.
B, T, K, D = 6, 4, 3, 8


class Around(nn.Module):
    """``inner`` between two layers, and ``after`` them; with all that some inner needs."""

    def __init__(self, inner: Inner, after: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Linear(K, D), nn.Linear(D, D), nn.Linear(D, 2)
        self.gain = nn.Parameter(torch.randn(D))
        self.table = nn.Embedding(T, D)
        self.norm = nn.LayerNorm(D)
        self.gate = nn.Parameter(torch.zeros(D))
        self.register_buffer("seen", torch.zeros(D))
        self.inner, self.after = inner, after
        self.calls = 0
        self.own = torch.Generator().manual_seed(5)
        self.of_numpy = np.random.default_rng(5)
        self.of_python = random.Random(5)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.after(self.head(torch.tanh(self.inner(self, self.embed(x)))))


# -- wrong ----------------------------------------------------------------------------------------


def mixup(order: Callable[[Any, int], Any], part: float = 0.5, detach: bool = False) -> Inner:
    """Each sample with another one."""

    def inner(m: Any, h: Tensor) -> Tensor:
        h = m.layer(h)
        other = h[torch.as_tensor(order(m, len(h)))]
        return part * h + (1 - part) * (other.detach() if detach else other)

    return inner


def features_swapped(m: Any, h: Tensor) -> Tensor:
    h = m.layer(h)
    mask = torch.rand(h.shape[-1]) < 0.5
    mask[0] = True
    return torch.where(mask, h[torch.randperm(len(h))], h)


def scaled_by_the_largest(m: Any, h: Tensor) -> Tensor:
    h = m.layer(h)
    return h / h.detach().abs().amax()


class ByBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g / g.norm()


def hooked(scale: Callable[[Tensor, Tensor], Tensor]) -> Inner:
    """A hook that looks at the whole batch's gradient."""

    def inner(m: Any, h: Tensor) -> Tensor:
        h = m.layer(h)
        if h.requires_grad:
            h.register_hook(lambda g: g * scale(g, h.detach()))
        return h

    return inner


def batch_normalized(m: Any, h: Tensor) -> Tensor:
    h = m.layer(h)
    return (h - h.mean(0)) / (h.var(0) + 1e-3).sqrt()


def sorted_rows(m: Any, h: Tensor) -> Tensor:
    h = m.layer(h)
    return h[h[:, 0, 0].argsort()]


def sorted_and_back(m: Any, h: Tensor) -> Tensor:
    order = h.detach()[:, 0, 0].argsort()
    return m.layer(h[order])[order.argsort()]


def rolled_inside(m: Any, h: Tensor) -> Tensor:
    return m.layer(h.roll(1, 0)).roll(-1, 0)


def two_swapped_inside(m: Any, h: Tensor) -> Tensor:
    order = torch.tensor([1, 0, *range(2, len(h))][: len(h)])
    return m.layer(h[order])[order]


def shuffled_inside(m: Any, h: Tensor) -> Tensor:
    order = torch.randperm(len(h))
    return m.layer(h[order])[order.argsort()]


def expert_choice(m: Any, h: Tensor) -> Tensor:
    """An expert takes exactly as many tokens as there are samples."""
    tokens = h.flatten(0, 1)
    best = tokens.detach().sum(1).topk(len(h)).indices
    return h + torch.zeros_like(tokens).index_copy(0, best, m.layer(tokens[best])).view_as(h)


def capacity(m: Any, h: Tensor) -> Tensor:
    """First come, first served, half of the tokens."""
    tokens = h.flatten(0, 1)
    keep = torch.arange(len(tokens)) < len(tokens) // 2
    return h + m.layer(h) * keep.view(h.shape[:2])[..., None]


def attends_over_samples(m: Any, h: Tensor) -> Tensor:
    h = m.layer(h)
    return F.scaled_dot_product_attention(
        h.transpose(0, 1), h.transpose(0, 1), h.transpose(0, 1)
    ).transpose(0, 1)


def by_place(m: Any, h: Tensor) -> Tensor:
    return m.layer(h + torch.arange(len(h), dtype=h.dtype)[:, None, None])


def divided_by_the_size(m: Any, h: Tensor) -> Tensor:
    return m.layer(h) / len(h)


def outlier_guard(m: Any, h: Tensor) -> Tensor:
    """Something else only if a sample is far out."""
    h = m.layer(h)
    return h * 0.5 if h.detach().abs().max() > 30 else h


def behind_zero_gates(m: Any, h: Tensor) -> Tensor:
    return m.layer(h) + m.gate * h.mean(0, keepdim=True).expand_as(h)


def behind_two_zero_gates(m: Any, h: Tensor) -> Tensor:
    return m.layer(h) + m.gate * (m.gate * h.mean(0, keepdim=True).expand_as(h))


def in_eight_bits(m: Any, h: Tensor) -> Tensor:
    """One scale for the whole tensor."""
    h = m.layer(h)
    scale = 448.0 / h.detach().abs().max()
    rounded = (h.detach() * scale).to(torch.float8_e4m3fn).to(h.dtype) / scale
    return h + rounded - h.detach()


def routed_by_rank(m: Any, h: Tensor) -> Tensor:
    """The half of the samples that is largest takes another way."""
    rank = h.detach().flatten(1).sum(1).argsort().argsort()
    return torch.where((rank >= len(h) // 2)[:, None, None], m.layer(h), m.norm(h))


def ordered_by_values(m: Any, h: Tensor) -> Tensor:
    """Rows lie position by position only beside a sample that is out of the ordinary."""
    rows = h.flatten(0, 1)
    if h.detach().abs().max() < 20:
        return m.layer(rows).view_as(h)
    rows = m.layer(h.transpose(0, 1).flatten(0, 1))
    return rows.view(T, len(h), -1).transpose(0, 1)


def by_a_coin(m: Any, h: Tensor) -> Tensor:
    h = m.layer(h)
    return h.roll(1, 0) if random.random() < 0.5 else h


def coin_of_torch(m: Any, h: Tensor) -> Tensor:
    h = m.layer(h)
    return torch.where(torch.rand(()) < 0.5, h.roll(1, 0), h)


def longest_of_the_batch(m: Any, h: Tensor) -> Tensor:
    h = m.layer(h)
    return h * (h.detach() > 0).flatten(1).sum(1).max() / (T * D)


def flat_time_first(m: Any, h: Tensor) -> Tensor:
    rows = m.layer(h.transpose(0, 1).flatten(0, 1))
    return rows.view(T, len(h), -1).transpose(0, 1)


def in_halves(m: Any, h: Tensor) -> Tensor:
    rows = m.layer(h.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 2))
    return rows.view(2, len(h), T // 2, -1).transpose(0, 1).flatten(1, 2)


WRONG: dict[str, Inner] = {
    "repetitions of a parameter that move": lambda m, h: (
        h + m.gate.expand(len(h), D).roll(1, 0)[:, None]
    ),
    "mean of repetitions of a parameter": lambda m, h: h + m.gate.expand(len(h), D).mean(0),
    "flat, time first": flat_time_first,
    "halves": in_halves,
    "mixup": mixup(lambda m, n: torch.randperm(n)),
    "mixup, numpy": mixup(lambda m, n: np.random.permutation(n)),
    "mixup, own generator": mixup(lambda m, n: torch.randperm(n, generator=m.own)),
    "mixup, own numpy": mixup(lambda m, n: m.of_numpy.permutation(n)),
    "mixup, argsort": mixup(lambda m, n: torch.rand(n).argsort()),
    "mixup, fixed": mixup(lambda m, n: torch.arange(n).flip(0)),
    "mixup, faint": mixup(lambda m, n: torch.randperm(n), part=0.99),
    "features swapped": features_swapped,
    "scaled by the largest": scaled_by_the_largest,
    "function, norm": lambda m, h: ByBatch.apply(m.layer(h)),
    "hook, norm": hooked(lambda g, h: 1 / g.norm()),
    "hook, activations": hooked(lambda g, h: h.mean()),
    "mean": lambda m, h: m.layer(h) - m.layer(h).mean(0),
    "mean, detached": lambda m, h: m.layer(h) - h.mean(0).detach(),
    "mean, faint": lambda m, h: m.layer(h) + 0.01 * h.mean(0, keepdim=True),
    "normalized": batch_normalized,
    "sorted": sorted_rows,
    "sorted and back": sorted_and_back,
    "rolled inside": rolled_inside,
    "rolled": lambda m, h: m.layer(h).roll(1, 0),
    "rolled, detached": lambda m, h: m.layer(h) + h.detach().roll(1, 0),
    "two swapped inside": two_swapped_inside,
    "shuffled inside": shuffled_inside,
    "expert choice": expert_choice,
    "attends over samples": attends_over_samples,
    "outlier guard": outlier_guard,
    "behind zero gates": behind_zero_gates,
    "behind two zero gates": behind_two_zero_gates,
    "eight bits": in_eight_bits,
    "routed by rank": routed_by_rank,
    "a coin, python": by_a_coin,
    "a coin, torch": coin_of_torch,
    "longest": longest_of_the_batch,
}

#: What the look before a first step does not see, and ``flash-clipping check`` does.
SEEN_BY_CHECK: dict[str, Inner] = {
    "hook, largest": hooked(lambda g, h: 1 / g.abs().max()),
    "hook, mean": hooked(lambda g, h: 1 + g.mean()),
    "hook, sign": hooked(lambda g, h: g.sum().sign()),
    "hook, size": hooked(lambda g, h: torch.tensor(1 / len(g))),
    "order by values": ordered_by_values,
    "divided by the size": divided_by_the_size,
    "capacity": capacity,
    "place in the batch": by_place,
}

#: The same of outputs: a gradient does not show what is only added to them.
WRONG_AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "output, shifted": lambda y: y - y.mean(0).detach(),
    "output, scaled": lambda y: y / y.detach().norm(),
    "output, rolled": lambda y: y.roll(1, 0),
    "output, softmax over samples": lambda y: y.softmax(0),
}


# -- right ----------------------------------------------------------------------------------------


def dropped(m: Any, h: Tensor) -> Tensor:
    return F.dropout(m.layer(F.dropout(h, 0.3)), 0.5)


def dropped_where_large(m: Any, h: Tensor) -> Tensor:
    """Values decide how much is drawn."""
    h = m.layer(h)
    large = h.detach().sum(-1) > 0
    return h.index_put(large.nonzero(as_tuple=True), F.dropout(h[large], 0.3))


def frames_masked(m: Any, h: Tensor) -> Tensor:
    """As SpecAugment: NumPy draws by the length of each sample in turn."""
    h = m.layer(h)
    kept = torch.ones(h.shape[:2], dtype=torch.bool)
    for b, length in enumerate((h.detach().sum(-1) > 0).sum(1).tolist()):
        kept[b, np.random.choice(length, min(2, length), replace=False)] = False
    return h * kept[..., None]


def waited(m: Any, h: Tensor) -> Tensor:
    """Draws until it likes what it gets."""
    while random.random() > 0.5:
        pass
    return m.layer(h)


def dropped_path(m: Any, h: Tensor) -> Tensor:
    keep = torch.rand(len(h), 1, 1) < 0.7
    return h + m.layer(h) * keep / 0.7


def dropped_layer(by: Callable[[Any], float]) -> Inner:
    return lambda m, h: m.norm(h) if by(m) < 0.3 else m.layer(h)


def noisy(m: Any, h: Tensor) -> Tensor:
    h = m.layer(h)
    return h + 0.1 * torch.randn_like(h)


def random_crop(m: Any, h: Tensor) -> Tensor:
    at = random.randrange(T - 1)
    return h + m.layer(h[:, at : at + 2]).mean(1, keepdim=True)


def rows_scaled_by_hook(m: Any, h: Tensor) -> Tensor:
    h = m.layer(h)
    h.register_hook(lambda g: g / (g.flatten(1).norm(dim=1)[:, None, None] + 1e-6))
    return h


def time_first(m: Any, h: Tensor) -> Tensor:
    return m.layer(h.transpose(0, 1)).transpose(0, 1)


def flat(m: Any, h: Tensor) -> Tensor:
    return m.layer(h.flatten(0, 1)).view_as(h)


def attended(m: Any, h: Tensor) -> Tensor:
    q, k, v = m.layer(h), m.norm(h), h
    return F.scaled_dot_product_attention(q, k, v)


def attended_and_dropped(m: Any, h: Tensor) -> Tensor:
    q, k, v = m.layer(h), m.norm(h), h
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)


def masked(m: Any, h: Tensor) -> Tensor:
    scores = m.layer(h) @ h.mT
    mask = torch.ones(T, T).tril() == 0
    return scores.masked_fill(mask, torch.finfo(h.dtype).min).softmax(-1) @ h


def checkpointed(reentrant: bool) -> Inner:
    def block(m: Any, h: Tensor) -> Tensor:
        return F.dropout(torch.tanh(m.layer(h)), 0.3)

    return lambda m, h: checkpoint(block, m, h, use_reentrant=reentrant)


def counted(m: Any, h: Tensor) -> Tensor:
    m.last = h.detach()
    return m.layer(h) * (1 + 0.01 * m.calls)


def in_half_precision(m: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.layer(h).to(h.dtype)


def frozen_shift(m: Any, h: Tensor) -> Tensor:
    return m.layer(h) + m.seen


def recurrent(m: Any, h: Tensor) -> Tensor:
    state, found = torch.zeros_like(h[:, 0]), []
    for t in range(h.shape[1]):
        state = torch.tanh(m.layer(h[:, t]) + state)
        found.append(state)
    return torch.stack(found, 1)


RIGHT: dict[str, Inner] = {
    "plain": lambda m, h: m.layer(h),
    "norm": lambda m, h: m.norm(m.layer(h)),
    "gain": lambda m, h: m.layer(h) * m.gain,
    "gate of 0": lambda m, h: h + m.gate * m.layer(h),
    "positions": lambda m, h: m.layer(h) + m.table.weight,
    "positions, looked up": lambda m, h: m.layer(h + m.table(torch.arange(T))),
    "positions, expanded": lambda m, h: h + m.table(torch.arange(T).expand(len(h), -1)),
    "class token": lambda m, h: m.layer(torch.cat([m.gain.expand(len(h), 1, -1), h], 1)),
    "dropout": dropped,
    "dropout of channels": lambda m, h: F.dropout1d(m.layer(h), 0.3),
    "alpha dropout": lambda m, h: F.alpha_dropout(m.layer(h), 0.3),
    "dropout where large": dropped_where_large,
    "frames masked, numpy": frames_masked,
    "path dropped": dropped_path,
    "waits for a number": waited,
    "layer dropped, torch": dropped_layer(lambda m: torch.rand(()).item()),
    "layer dropped, numpy": dropped_layer(lambda m: np.random.rand()),
    "layer dropped, own python": dropped_layer(lambda m: m.of_python.random()),
    "noise": noisy,
    "random crop": random_crop,
    "hook by row": rows_scaled_by_hook,
    "hook, constant": hooked(lambda g, h: torch.tensor(2.0)),
    "time first": time_first,
    "flat": flat,
    "attention": attended,
    "attention, dropped": attended_and_dropped,
    "attention, masked": masked,
    "checkpoint": checkpointed(False),
    "checkpoint, re-entrant": checkpointed(True),
    "counts": counted,
    "autocast": in_half_precision,
    "buffer": frozen_shift,
    "recurrent": recurrent,
    "twice": lambda m, h: m.layer(torch.tanh(m.layer(h))),
    "tied": lambda m, h: F.linear(m.layer(h), m.layer.weight),
    "first position alone": lambda m, h: h[:, :1] + m.layer(h)[:, :1],
}
