"""How many examples a property test draws."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

#: ``default`` is deterministic; ``FLASH_CLIPPING_PROFILE=long`` draws anew and more.
PROFILE = os.environ.get("FLASH_CLIPPING_PROFILE", "default")


def profile(max_examples: int) -> settings:
    """Settings for a property test of this many examples in CI, forty times as many when long."""
    common: dict[str, Any] = {
        "deadline": None,
        "database": None,
        "suppress_health_check": list(HealthCheck),
    }
    if PROFILE == "long":
        return settings(max_examples=40 * max_examples, print_blob=True, **common)
    if PROFILE != "default":
        raise ValueError(f"FLASH_CLIPPING_PROFILE={PROFILE!r}; expected 'default' or 'long'.")
    return settings(max_examples=max_examples, derandomize=True, **common)
