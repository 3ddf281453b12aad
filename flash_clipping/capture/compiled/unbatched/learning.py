"""What is noted of values that are the same for all samples, while a region learns its shapes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flash_clipping.capture.proxies.parameter_proxy import circumstances


class _Learning(threading.local):
    #: While a region learns what its layers see: why what is the same for all cannot be served.
    found: list[str] | None = None
    #: The modules, by path, whose parameters functions were called with.
    used: set[str] = set()  # noqa: RUF012 (one for each thread as soon as it learns)
    #: What a checkpoint changes, as it was outside of any.
    outside: Any = None


learning = _Learning()


@contextmanager
def noting_misuse() -> Iterator[list[str]]:
    """While the body runs, functions that are not served run as they would have; they are noted."""
    before = learning.found, learning.used, learning.outside
    found: list[str] = []
    learning.found, learning.used, learning.outside = found, set(), circumstances()
    try:
        yield found
    finally:
        learning.found, learning.used, learning.outside = before


def was_used(path: str) -> bool:
    """Whether a function was called with what comes from the module at ``path``."""
    return path in learning.used


def is_checkpointed() -> bool:
    """Whether an activation checkpoint inside of the region runs."""
    return bool(learning.outside != circumstances())
