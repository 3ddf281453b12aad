"""Every test of the diagnostics draws the same numbers; rules that it registers go again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flash_clipping.rules import registry


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rules that a test registers are gone afterwards."""
    before = dict(registry._RULES)
    yield
    registry._RULES.clear()
    registry._RULES.update(before)
