"""Whether a collate function keeps the order of the samples that it is given.

Where the engine says of rows who they belong to (privacy units), or which of them count (batches of
one size), it says so by their order. A collate function that sorts, by length say, would put other
rows into these places: units would be clipped by the wrong map, and rows that only fill a batch up
would be counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from flash_clipping.errors import FlashClippingError


class OrderedCollate:
    """A collate function that is refused unless it keeps order.

    Samples in reverse order must give rows in reverse order. That is looked at in the first
    batches, in every process that collates, until one had rows that differ.

    Args:
        collate: what is called.
        what: the argument of ``make_private`` that needs it.

    Raises:
        FlashClippingError: in a call, where rows come back in another order, or with other values:
            nothing tells then which sample a row is of.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], what: str):
        self.wrapped_collator_fn = collate
        self.what = what
        self._is_known = False

    def __call__(self, samples: Any) -> Any:
        if self._is_known or not isinstance(samples, list) or len(samples) < 2:
            return self.wrapped_collator_fn(samples)
        reverse = copy.deepcopy(samples[::-1])  # collate functions may take samples apart
        with torch.random.fork_rng(devices=[]):
            backward = self.wrapped_collator_fn(reverse)
        batch = self.wrapped_collator_fn(samples)
        for rows, other in zip(_tensors(batch), _tensors(backward), strict=False):
            if not rows.dim() or len(rows) != len(samples) or rows.shape != other.shape:
                continue
            if not _are_equal(rows, other.flip(0)):
                raise FlashClippingError(
                    f"collate_fn: {self.what} goes by the order of the rows, and this collate "
                    "function gave other rows for the same samples in reverse order: it sorts "
                    "them, or changes them at random. Keep their order; sort inside of the model, "
                    "and change samples in the dataset's __getitem__."
                )
            self._is_known = self._is_known or not _are_equal(rows, other)
        return batch


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Those of a batch, in its order; batches of tokenizers are mappings of their own."""
    if isinstance(batch, Mapping):
        batch = [*batch.values()]
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors(part)


def _are_equal(x: Tensor, y: Tensor) -> bool:
    return bool(((x == y) | ((x != x) & (y != y))).all())
