"""What is released, for the tests that look at it."""

from __future__ import annotations

import pytest

from tests.support.opacus_randomness import use_randomness_of_opacus
from tests.support.private import Released


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Released:
    return Released(monkeypatch)


@pytest.fixture
def randomness_of_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and noise are those that Opacus draws after the same ``torch.manual_seed``."""
    use_randomness_of_opacus(monkeypatch)
