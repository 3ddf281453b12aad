"""One factor from several: for all uses of a parameter, or for all parts of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.factors.base import Dense, Factor
from flash_clipping.factors.embedding import Lookup, TiedEmbedding
from flash_clipping.factors.linear import Outer


class Stacked(Factor):
    """A parameter whose leading axis is made of parts, each with a gradient of its own.

    ``nn.MultiheadAttention`` keeps the projections of query, key and value in one matrix.
    """

    def __init__(self, parts: Sequence[Factor]):
        self.parts = list(parts)

    @property
    def batch_size(self) -> int:
        return self.parts[0].batch_size

    def sqnorms(self, backend: str) -> Tensor:
        return torch.stack([part.sqnorms(backend) for part in self.parts]).sum(0)

    def doubt(self, backend: str) -> Tensor | None:
        found = [part.doubt(backend) for part in self.parts]
        doubts = [doubt_B for doubt_B in found if doubt_B is not None]
        return torch.stack(doubts).sum(0) if doubts else None

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        return torch.cat([part.clipped_sum(coef_B, backend) for part in self.parts])

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts], dim=1)


def merge(factors: Sequence[Factor]) -> Factor:
    """One factor for all uses of one parameter: uses of one kind are laid end to end along T."""
    if len(factors) == 1:
        return factors[0]
    by_kind: dict[type[Factor], list[Factor]] = {}
    for factor in factors:
        by_kind.setdefault(type(factor), []).append(factor)
    merged = [
        kind.concatenate(group) if len(group) > 1 else group[0] for kind, group in by_kind.items()
    ]
    if len(merged) == 1:
        return merged[0]
    kinds = {type(factor): factor for factor in merged}
    if set(kinds) == {Lookup, Outer}:
        lookup, head = kinds[Lookup], kinds[Outer]
        assert isinstance(lookup, Lookup) and isinstance(head, Outer)
        return TiedEmbedding(lookup, head)
    return Dense.sum_of(merged)
