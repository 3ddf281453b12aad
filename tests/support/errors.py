"""Errors and warnings of the library, by their codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import pytest

from flash_clipping import FlashClippingError

Kinds: TypeAlias = type[Exception] | tuple[type[Exception], ...]


@contextmanager
def raises(
    code: str, kind: Kinds = FlashClippingError, *, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """``pytest.raises`` of an error of the library with this code, or one of several:
    ``"FC201|FC202"``."""
    with pytest.raises(kind, match=match) as info:
        yield info
    found = getattr(info.value, "code", None)
    if found not in code.split("|"):
        raise AssertionError(f"expected {code}, found {found}") from info.value


@contextmanager
def warns(
    code: str, kind: type[Warning] = UserWarning, *, match: str = ""
) -> Iterator[pytest.WarningsRecorder]:
    """``pytest.warns`` of a warning of the library with this code."""
    with pytest.warns(kind, match=rf"(?s)^{code} .*{match}") as found:
        yield found
