"""Collate functions that mix samples are warned of; others never are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, default_collate

from flash_clipping.engine.sampling.mixing import warn_of_mixing
from tests.support.errors import warns

Items = list[tuple[Tensor, Tensor]]


class Texts(list[Any]):
    def __init__(self) -> None:
        torch.manual_seed(0)
        lengths = (5, 2, 7, 3)
        super().__init__((torch.randn(n, 3) + 4, torch.tensor(n % 3)) for n in lengths)


class Images(list[Any]):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__((torch.randn(4, 4), torch.tensor(n % 3)) for n in range(4))


def mixup(items: Items) -> tuple[Tensor, Tensor]:
    x, y = default_collate(items)
    share = torch.distributions.Beta(1.0, 1.0).sample()
    y = F.one_hot(y, 3).float()
    return share * x + (1 - share) * x.roll(1, 0), share * y + (1 - share) * y.roll(1, 0)


def mixed_with_a_permutation(items: Items) -> tuple[Tensor, Tensor]:
    x, y = default_collate(items)
    return x.lerp(x[torch.randperm(len(x))], 0.3), y


def standardised(items: Items) -> tuple[Tensor, Tensor]:
    x, y = default_collate(items)
    return (x - x.mean(0)) / x.std(0), y


def padded(items: Items) -> dict[str, Tensor]:
    x = pad_sequence([x for x, _ in items], batch_first=True)
    return {"x": x, "y": torch.stack([y for _, y in items])}


def sorted_by_length(items: Items) -> dict[str, Tensor]:
    return padded(sorted(items, key=lambda item: -len(item[0])))


def masked(items: Items) -> dict[str, Tensor]:
    found = padded(items)
    return {**found, "x": found["x"] * (torch.rand(found["x"].shape[:2]) < 0.5)[..., None]}


def augmented(items: Items) -> tuple[Tensor, Tensor]:
    x, y = default_collate(items)
    return x + torch.randn_like(x), y


generator = torch.Generator().manual_seed(0)


def augmented_by_its_own(items: Items) -> tuple[Tensor, Tensor]:
    x, y = default_collate(items)
    return x + torch.randn(x.shape, generator=generator), y


MIXING: dict[str, tuple[Any, Callable[..., Any]]] = {
    "mixup": (Images, mixup),
    "permuted": (Images, mixed_with_a_permutation),
    "standardised": (Images, standardised),
}
ALONE: dict[str, tuple[Any, Callable[..., Any] | None]] = {
    "default": (Images, None),
    "own": (Images, lambda items: default_collate(items)),
    "padded": (Texts, padded),
    "sorted": (Texts, sorted_by_length),
    "masked at random": (Texts, masked),
    "augmented": (Images, augmented),
    "augmented by its own": (Images, augmented_by_its_own),
    "lists": (Texts, lambda items: tuple(map(list, zip(*items, strict=True)))),
    "fails": (Texts, default_collate),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_collate_function_that_mixes_is_warned_of(name: str) -> None:
    dataset, collate = MIXING[name]
    with warns("FC336", match=f"its collate_fn \\({collate.__name__}\\) gives a sample"):
        warn_of_mixing(DataLoader(dataset(), batch_size=2, collate_fn=collate))


@pytest.mark.parametrize("name", ALONE)
def test_one_that_does_not_is_never_warned_of(name: str) -> None:
    dataset, collate = ALONE[name]
    loader = DataLoader(dataset(), batch_size=2, collate_fn=collate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = torch.random.get_rng_state()
        warn_of_mixing(loader)
    assert torch.equal(state, torch.random.get_rng_state())
