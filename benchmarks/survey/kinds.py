"""The kinds of models: what is built, and what it is called with. ``kinds.yaml`` lists them."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.survey import inputs
from benchmarks.survey.inputs import Inputs
from benchmarks.survey.tiny import tiny

LIST = Path(__file__).with_name("kinds.yaml")


@dataclass(frozen=True)
class Help:
    """What a user writes so that a kind is exact which is refused as it is.

    Attributes:
        words: of the page.
        options: of the wrapper.
        frozen: prefixes of parameters that are frozen.
        replaces: whether layers are replaced as ``ModuleValidator.fix`` does.
    """

    words: str
    options: dict[str, Any] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    replaces: bool = False


@dataclass(frozen=True)
class Kind:
    """One row of the survey.

    Attributes:
        name: how the page and ``--only`` call it.
        cls: the class of ``transformers``.
        inputs: what it is called with.
        changes: fields of its configuration that are not as :func:`tiny` makes them.
        dtype: of its weights; not float64 where the model's own code does not run in it.
        help: tried where the kind is refused as it is.
    """

    name: str
    cls: str
    inputs: Inputs
    changes: dict[str, Any]
    dtype: torch.dtype = torch.float64
    help: Help | None = None

    def build(self, chance: bool = False) -> nn.Module:
        """The model, with random weights; ``chance``: with the dropout of its configuration."""
        import transformers

        cls = getattr(transformers, self.cls)
        changes = copy.deepcopy(self.changes)  # configurations take out of what they are made of
        config = cls.config_class(**tiny(cls.config_class, changes, chance))
        model: nn.Module = cls(config)
        return model


@functools.cache
def all_kinds() -> dict[str, dict[str, Kind]]:
    """Section of the page -> name -> kind."""
    import yaml

    sections = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    del sections["shared"]
    return {
        title: {kind.name: kind for row in rows for kind in _of_row(*row)}
        for title, rows in sections.items()
    }


def _of_row(
    classes: str,
    given: Any,
    changes: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> list[Kind]:
    """The kinds of a row of the list."""
    options: dict[str, Any] = dict(more or {})
    if "help" in options:
        options["help"] = Help(**options["help"])
    if "dtype" in options:
        options["dtype"] = getattr(torch, options["dtype"])
    name = options.pop("name", None)
    called = _inputs(given)
    return [Kind(name or cls, cls, called, changes or {}, **options) for cls in classes.split()]


def _inputs(given: Any) -> Inputs:
    """Inputs as the list writes them: a function's name, its arguments behind it, or several."""
    if isinstance(given, list):
        return inputs.together(*map(_inputs, given))
    if isinstance(given, str):
        return getattr(inputs, given)()
    ((name, arguments),) = given.items()
    function = getattr(inputs, name)
    if isinstance(arguments, dict):
        return function(**arguments)
    return function(*arguments) if isinstance(arguments, list) else function(arguments)
