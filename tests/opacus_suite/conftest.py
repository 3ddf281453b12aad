"""Opacus' tests change global settings and leave them so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def global_settings() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Opacus' tests run in one mode. In the other ways to take gradients they are slow ones: models
    of all kinds are compared in these elsewhere (``tests/rules/``)."""
    kind = getattr(getattr(item, "cls", None), "__name__", "")
    if kind.endswith("TwoPass") or (kind.endswith("Hooks") and kind != "TestHooks"):
        item.add_marker(pytest.mark.slow)
