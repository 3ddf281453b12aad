"""A kernel that falls back to its reference would pass every test; here that is a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_clipping.ops.runtime import backend

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    strict = pytest.mark.filterwarnings(
        f"error::{backend.__name__}.{backend.TritonFallbackWarning.__name__}"
    )
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(strict)
