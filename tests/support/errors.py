"""Errors and warnings of the library, by their codes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import pytest

from flash_clipping import FlashClippingError

Kinds: TypeAlias = type[Exception] | tuple[type[Exception], ...]


def on_one_line(message: str) -> str:
    """A message with its sentences on one line; lines of code stay."""
    return re.sub(r"\n(?! )", " ", message)


@contextmanager
def raises(
    code: str, kind: Kinds = FlashClippingError, *, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """``pytest.raises`` of an error of the library with this code, or one of several:
    ``"FC201|FC202"``. ``match`` is looked for in its message, and in that with its sentences on one
    line."""
    with pytest.raises(kind) as info:
        yield info
    said = "\n".join([str(info.value), *getattr(info.value, "__notes__", [])])
    if match and not (re.search(match, said) or re.search(match, on_one_line(said))):
        raise AssertionError(f"expected {match!r}, found {said!r}") from info.value
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
