"""Errors and warnings of the library, by their codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def raises(
    code: str, kind: type[Exception] = Exception, *, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """``pytest.raises`` of an error of the library with this code."""
    with pytest.raises(kind, match=match) as info:
        yield info
    found = getattr(info.value, "code", None)
    if found != code:
        raise AssertionError(f"expected {code}, found {found}") from info.value


@contextmanager
def warns(code: str, *, match: str = "") -> Iterator[pytest.WarningsRecorder]:
    """``pytest.warns`` of a warning of the library with this code."""
    with pytest.warns(Warning, match=rf"(?s)^{code} .*{match}") as found:
        yield found
