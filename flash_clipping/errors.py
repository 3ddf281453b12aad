"""Errors, whose messages begin with codes, and lines for messages to end in."""

from __future__ import annotations

import math
import operator
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, SupportsFloat

_CODE = re.compile(r"\bFC\d{3} ")
_BETWEEN_SENTENCES = re.compile(r"(?<=[.?]) (?=[A-Z`])")


class Coded(Exception):
    """An error or warning whose message begins with the code of its cause, ``FC101``.

    Messages are written as sentences: the problem, its cause, what to do, then an indented line of
    code. Each sentence becomes a line. A code within the message, before which a layer's name was
    put, goes to its start.
    """

    def __init__(self, *args: object) -> None:
        found = _CODE.search(str(args[0])) if args else None
        if found:
            args = (found[0] + _BETWEEN_SENTENCES.sub("\n", without_code(found.string)),)
        super().__init__(*args)

    @property
    def code(self) -> str:
        """The code; empty where the message has none."""
        found = _CODE.match(str(self))
        return found[0].strip() if found else ""


def without_code(text: str) -> str:
    """A message, or a part of another one, without its code."""
    return _CODE.sub("", text, count=1)


class FlashClippingWarning(Coded, UserWarning):
    """A warning of this library that has no class of its own."""


def warn(message: str, stacklevel: int) -> None:
    """Warn as ``warnings.warn`` does there, of a message with a code."""
    warnings.warn(FlashClippingWarning(message), stacklevel=stacklevel + 1)


class NamesItsPage(Coded):
    """An error with a note below its message in tracebacks: the command that explains it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if self.code:
            self.add_note(f"More on this error:  flash-clipping errors {self.code}")

    def __reduce__(self) -> Any:
        # Whatever a subclass is made of (modules, other errors), to another process goes its text.
        return _with_text, (type(self), self.args, getattr(self, "__notes__", []))


def _with_text(kind: type[NamesItsPage], args: tuple[Any, ...], notes: list[str]) -> Any:
    error = kind.__new__(kind, *args)
    error.__notes__ = notes
    return error


class FlashClippingError(NamesItsPage, RuntimeError):
    """A model or a step that would give a wrong norm; the message says what to change."""


class InvalidValue(NamesItsPage, ValueError):
    """A ``ValueError`` of this library."""


class InvalidType(NamesItsPage, TypeError):
    """A ``TypeError`` of this library."""


class NotServed(NamesItsPage, NotImplementedError):
    """A ``NotImplementedError`` of this library."""


class NoAttribute(NamesItsPage, AttributeError):
    """An ``AttributeError`` of this library."""


class MissingPackage(NamesItsPage, ImportError):
    """An ``ImportError`` of this library."""


def check_one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Raise ``ValueError`` for an option that is none of those that are known."""
    if value not in known:
        raise InvalidValue(
            f"FC301 {name}={value!r} is unknown; expected one of {', '.join(known)}."
        )


def checked_number(
    name: str, value: Any, interval: str, example: object, *, whole: bool = False
) -> float:
    """The number that an option was given.

    Args:
        name: of the option.
        value: a number of Python's or NumPy's, or a tensor with one.
        interval: where it is to be, as it is written: ``"[0, inf)"``. NaN is nowhere.
        example: a value that is valid.
        whole: whether it is to be an integer.

    Raises:
        ValueError: it is no such number.
    """
    number = math.nan
    if not isinstance(value, bool):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):  # of an array, say
            if whole or isinstance(value, SupportsFloat):  # no text is
                number = float(operator.index(value) if whole else value)
    low, high = map(float, interval[1:-1].split(","))
    at_end = (number == low and interval[0] == "[") or (number == high and interval[-1] == "]")
    if not (low < number < high or at_end):
        kind = "a whole number" if whole else "a number"
        raise InvalidValue(
            f"FC302 {name}: found {value!r}; expected {kind} in {interval}:\n    {name}={example}"
        )
    return number


#: A note for ``torch.OutOfMemoryError`` in a loop that cannot go back to the batch.
HALVE_PARTS = """\
A loop cannot go back. Let parts of the batch that do not fit be halved, and run again:
    micro_batches = flash_clipping.MicroBatches(optimizer)
    micro_batches(lambda x, y: criterion(model(x), y).backward(), x, y)"""


#: Where a private model is exported, copied into another format.
TO_EXPORT = """\
Export the plain model: a copy of it during training, to_standard_module() after it:
    plain = copy.deepcopy(model).to_standard_module().eval()"""


def module_at(path: str) -> str:
    """Code for the module of a model that a message names: its path, or ``path (Type)``."""
    path = path.partition(" (")[0]
    return "model" if path in ("", "the model") else f'model.get_submodule("{path}")'


#: The last lines of a refusal for which there is nothing else.
ONE_BY_ONE = """
Or let samples run one at a time, which is exact for every model and slower: an argument of \
make_private, or of the wrapper:
    mode="one_by_one\""""


def missing_extra(extra: str, user: str, error: ImportError) -> ImportError:
    """What is raised where ``user`` needs packages of an extra that cannot be imported."""
    return MissingPackage(
        f"FC940 {user} needs the extra flash-clipping[{extra}]: {error}. In a clone of it:"
        f"\n    pip install -e '.[{extra}]'"
    )
