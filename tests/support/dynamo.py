"""PyTorch's compiler without what it measures of itself."""

from __future__ import annotations

import sys
from typing import Any


def measure_no_guards() -> None:
    """Leave out how long the guards of a new graph take: all caches of the processor are emptied
    for that, which takes longer than to trace a small model. It is only logged. Does nothing
    before Dynamo is imported."""
    guards: Any = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0
