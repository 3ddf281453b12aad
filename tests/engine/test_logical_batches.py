"""Parts of logical batches (``BatchMemoryManager``): two logical batches are never added up.

A loop that is left early, or a batch that is skipped, leaves sums and announcements behind. Sums
that were never released are left out, with a warning; a sample of two Poisson batches in one sum
would move it by twice the bound.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.errors import warns
from tests.support.private import SLACK, Private, Released, data


def parts(private: Private, loader: Any = None) -> BatchMemoryManager:
    return BatchMemoryManager(
        data_loader=loader or private.loader,
        max_physical_batch_size=4,
        optimizer=private.optimizer,
    )


def step(private: Private, x: Tensor) -> None:
    private.optimizer.zero_grad()
    (100 * private.model(x).square().sum(1).mean()).backward()
    private.optimizer.step()


def a_new_loop(private: Private) -> None:
    with parts(private) as batches:
        for x, _ in batches:
            step(private, x)


def a_loop_without(private: Private) -> None:
    for x, _ in private.loader:
        step(private, x)


@pytest.mark.parametrize("after", [a_new_loop, a_loop_without])
def test_a_loop_that_is_left_early(after: Callable[[Private], None], released: Released) -> None:
    """Three parts of the abandoned batch were released with the next."""
    private = Private(lr=0.0)
    expected = Private(lr=0.0)
    after(expected)
    clean = released.sums.copy()
    released.sums.clear()
    with parts(private) as batches:
        for number, (x, _) in enumerate(batches):
            step(private, x)
            if number == 2:
                break
    with warns("FC513"):
        after(private)
    assert len(released.sums) == len(clean) == 4
    for found, sums in zip(released.sums, clean, strict=True):
        assert all(map(torch.equal, found, sums))
    assert private.engine.accountant.history == expected.engine.accountant.history


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("skipped", [1, 3, 4])
def test_a_batch_that_is_skipped(skipped: int, workers: int, released: Released) -> None:
    """``continue`` on the second and last part of the first batch, the first of the second.

    Announcements were off by one from there on, so that sums held parts of two logical batches.
    """
    private = Private(lr=0.0, batch_size=16)
    loader = DataLoader(data(), batch_size=16, num_workers=workers)
    seen: list[list[int]] = []
    with parts(private, loader) as batches, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logical: list[int] = []
        for number, (x, _) in enumerate(batches):
            if number != skipped:
                before = len(released.releases)
                step(private, x)
                logical.append(number // 4)
                if len(released.releases) > before:
                    seen.append(logical)
                    logical = []
    left_out = [w for w in caught if "nothing of them was released" in str(w.message)]
    if skipped == 3:  # with its last part gone, the rest of the batch has no end
        assert len(left_out) == 1 and len(released.releases) == 3
    else:
        assert not left_out and [set(of) for of in seen] == [{0}, {1}, {2}, {3}]
    for sums in released.sums:
        total = torch.cat([s.flatten() for s in sums]).norm().item()
        assert total <= 16 * 0.1 * SLACK
