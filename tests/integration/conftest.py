"""What is released, for the tests that look at it."""

from __future__ import annotations

import pytest

from tests.support.private import Released


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Released:
    return Released(monkeypatch)
