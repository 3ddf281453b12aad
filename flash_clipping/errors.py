"""The error that is raised in place of a wrong norm, and lines for messages to end in."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, SupportsFloat


class NamesItsPage(Exception):
    """An error with a note, which tracebacks show below the message: the page that has an entry for
    it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note("docs/troubleshooting.md has an entry for this error, by its text.")

    def __reduce__(self) -> Any:
        # Whatever a subclass is made of (modules, other errors), to another process goes its text.
        return _with_text, (type(self), self.args, self.__notes__)


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


def check_one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Raise ``ValueError`` for an option that is none of those that are known."""
    if value not in known:
        raise InvalidValue(f"{name}={value!r} is unknown; expected one of {', '.join(known)}.")


def checked_number(
    name: str, value: Any, interval: str, example: object, *, whole: bool = False
) -> float:
    """The number that an option was given.

    Args:
        name: of the option.
        value: what was found: a number of Python's or NumPy's, or a tensor with one.
        interval: where it is to be, as it is written: ``"[0, inf)"``. NaN is nowhere.
        example: a value that serves.
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
            f"{name}: found {value!r}; expected {kind} in {interval}:\n    {name}={example}"
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


#: The last lines of a refusal that nothing else serves.
ONE_BY_ONE = """
Or let samples run one at a time, which is exact for every model and slower: an argument of \
make_private, or of the wrapper:
    mode="one_by_one\""""


def to_freeze(*paths: str) -> str:
    """The last lines of a refusal: code that freezes the modules that it names, and of the model
    itself its own parameters only; and the mode that does without."""
    inner = [path for path in paths if module_at(path) != "model"]
    own = "\n    for param in model.parameters(recurse=False): param.requires_grad_(False)"
    line = own if len(inner) < len(paths) else ""
    if len(inner) == 1:
        line += f"\n    {module_at(inner[0])}.requires_grad_(False)"
    elif inner:
        names = ", ".join(f'"{path.partition(" (")[0]}"' for path in inner)
        line += f"\n    for path in [{names}]: model.get_submodule(path).requires_grad_(False)"
    return line + ONE_BY_ONE


def to_freeze_parameters(*names: str) -> str:
    """A line of a refusal: code that freezes the parameters that it names."""
    if len(names) == 1:
        return f'\n    model.get_parameter("{names[0]}").requires_grad_(False)'
    listed = ", ".join(f'"{name}"' for name in names)
    return f"\n    for name in [{listed}]: model.get_parameter(name).requires_grad_(False)"


def missing_extra(extra: str, user: str, error: ImportError) -> ImportError:
    """What is raised where ``user`` needs packages of an extra that cannot be imported."""
    return ImportError(
        f"{user} needs the extra flash-clipping[{extra}]: {error}. In a clone of the repository:"
        f"\n    pip install -e '.[{extra}]'"
    )
