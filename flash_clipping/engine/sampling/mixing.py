"""Collate functions that mix samples: looked at once, when a loader is given."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from flash_clipping._compat import pytree
from flash_clipping.capture.no_trace import random_state


def warn_of_mixing(loader: Any) -> None:
    """Warn of a collate function that mixes samples: two batches with one sample in common have no
    row in common. Both are made of the same items, by the same random numbers.

    Warns:
        UserWarning: so it is, for some tensor of the batches. Nothing is said where it cannot be
            told: of random rows that are padded to other lengths, say.
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
        one, other = rows(first, second), rows(first, third)
        again, anew = rows(first, second), rows(first, second, seed=1)
        if not all(map(torch.equal, one, again)):
            return  # it draws by a generator of its own
        is_random = not all(map(torch.equal, one, anew))
        if is_random and any(a.shape != b.shape for a, b in zip(one, other, strict=True)):
            return
        if all(_share_a_row(a, b) for a, b in zip(one, other, strict=True)):
            return
    except Exception:  # noqa: BLE001  (it needs other items, or more of them)
        return
    name = getattr(collate, "__name__", type(collate).__name__)
    warnings.warn(
        f"data_loader: its collate_fn ({name}) gives a sample another row beside another sample. "
        "Where it mixes samples (mixup, cutmix, statistics of the batch), one of them changes the "
        "gradients of others, and no clipping bounds that. Augment each sample by itself, in the "
        "dataset, and standardise by public statistics:\n"
        "    DataLoader(dataset, batch_size=batch_size)",
        stacklevel=3,
    )


def _share_a_row(one: Tensor, other: Tensor) -> bool:
    """Whether two batches have a row in common, in what both have: one may be padded further."""
    sizes = [min(pair) for pair in zip(one.shape[1:], other.shape[1:], strict=True)]
    both = tuple(slice(size) for size in sizes)
    return any(torch.equal(a[both], b[both]) for a in one for b in other)
