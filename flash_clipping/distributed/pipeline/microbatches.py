"""Batches of any size as what a pipeline takes: so many micro-batches of so many samples.

Stages send each other tensors of a fixed size, and a Poisson batch has any. So a batch is cut into
*rounds* of as many samples as a schedule takes, and the last round is filled up with samples that
are made up. These get coefficient 0 and are in no sum and no norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_clipping._compat import pytree
from flash_clipping.errors import FlashClippingError


@dataclass(frozen=True)
class Round:
    """The samples of a batch that one run of the schedule takes.

    Attributes:
        start: the first of them.
        count: how many there are; the others are made up.
        capacity: how many the schedule takes.
    """

    start: int
    count: int
    capacity: int

    def of(self, x: Tensor, axis: int, fill: int) -> Tensor:
        """This round's samples of a tensor: ``capacity`` along ``axis``.

        Samples are made up of those that are there, in turn, so that they are as valid as these;
        ``fill`` is all that they hold where there are none.
        """
        part = x.narrow(axis, self.start, self.count)
        missing = self.capacity - self.count
        if not missing:
            return part
        if not self.count:
            return x.new_full((*x.shape[:axis], missing, *x.shape[axis + 1 :]), fill)
        again = torch.arange(missing, device=x.device) % self.count
        return torch.cat([part, part.index_select(axis, again)], axis)


def rounds(samples: int, capacity: int) -> Iterator[Round]:
    """The rounds of a batch; one, of samples that are all made up, where there are none."""
    for start in range(0, max(samples, 1), capacity):
        yield Round(start, min(capacity, samples - start), capacity)


def samples_in(values: Any, axis: int, what: str) -> int | None:
    """How many samples these tensors have along ``axis``; ``None`` without tensors.

    Raises:
        FlashClippingError: they have different numbers.
    """
    tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]
    sizes = {x.shape[axis] if x.dim() > axis else None for x in tensors}
    if len(sizes) > 1 or None in sizes:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise FlashClippingError(
            f"PrivateSchedule.step: found {what} of shapes {shapes}; expected tensors with as many "
            f"samples along axis {axis}, which are split into micro-batches. What is the same for "
            "all samples belongs into the stage's module."
        )
    return sizes.pop() if sizes else None


def map_samples(of_round: Round, values: Any, axis: int, fill: int) -> Any:
    """``values`` with this round's samples in every tensor."""
    return pytree.tree_map(
        lambda x: of_round.of(x, axis, fill) if isinstance(x, Tensor) else x, values
    )
