"""Collate functions that mix samples: checked once, when a loader is given."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from flash_clipping._compat import pytree
from flash_clipping.capture.no_trace import random_state
from flash_clipping.errors import warn


def warn_of_mixing(loader: DataLoader[Any]) -> None:
    """Warn of a collate function that mixes samples: two batches with one sample in common have no
    row in common. Both are made of the same items, by the same random numbers.

    Warns:
        UserWarning: so it is for some tensor. Not of random rows that are padded differently.
    """
    dataset, collate = loader.dataset, loader.collate_fn
    if collate in (None, default_collate) or not hasattr(dataset, "__getitem__"):
        return

    def rows(*items: Any, seed: int = 0) -> list[Tensor]:
        with random_state([], seed=seed):
            found = collate(copy.deepcopy([*items]))
        tensors = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]
        return [x for x in tensors if x.dim() and len(x) == len(items)]

    try:
        with random_state([], seed=0):
            first, second, third = (dataset[index] for index in range(3))
        # A permutation of two may leave them as they are.
        draws = [[rows(first, x, seed=seed) for x in (second, third)] for seed in range(6)]
        one, pairs = draws[0][0], [pair for each in draws for pair in zip(*each, strict=True)]
        if not all(map(torch.equal, one, rows(first, second))):
            return  # it draws by a generator of its own
        is_random = not all(all(map(torch.equal, one, anew)) for anew, _ in draws)
        if is_random and any(x.shape != y.shape for x, y in pairs):
            return
        if all(_share_a_row(x, y) for x, y in pairs):
            return
    except Exception:  # noqa: BLE001  (it needs other items, or more of them)
        return
    name = getattr(collate, "__name__", type(collate).__name__)
    warn(
        f"FC336 data_loader: its collate_fn ({name}) gives a sample another row beside another "
        "sample. If it mixes samples (mixup, cutmix, statistics of the batch), no clipping bounds "
        "one. Augment each sample alone, in the dataset:\n"
        "    DataLoader(dataset, batch_size=batch_size)",
        stacklevel=3,
    )


def _share_a_row(one: Tensor, other: Tensor) -> bool:
    """Whether two batches have a row in common, in what both have: one may be padded further."""
    sizes = [min(pair) for pair in zip(one.shape[1:], other.shape[1:], strict=True)]
    both = tuple(slice(size) for size in sizes)
    return any(torch.equal(a[both], b[both]) for a in one for b in other)
