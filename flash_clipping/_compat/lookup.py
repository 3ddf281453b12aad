"""How a private interface is looked for, and what is said where it is missing."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NoReturn

import torch

#: Versions that have all of this: tests ran with the first and the last.
KNOWN = {"PyTorch": "2.11 to 2.15", "Triton": "3.6 to 3.9", "Opacus": "1.6"}


class MissingInterface(ImportError):
    """A private interface that has no substitute is not in the installed version."""


def refuse(name: str, package: str = "PyTorch") -> NoReturn:
    """Say that this private name is needed and missing."""
    raise MissingInterface(
        f"flash_clipping needs {name}, which the installed {package} does not have. Known to work: "
        f"{package} {KNOWN[package]}."
    )


def find(holder: Any, path: str) -> Any:
    """What is at this dotted path, or ``None``."""
    for name in path.split("."):
        holder = getattr(holder, name, None)
    return holder


def load(name: str) -> Any:
    """A module, or ``None``."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def attribute(holder: Any, name: str, package: str = "PyTorch") -> Any:
    """A private attribute that has no substitute."""
    if not hasattr(holder, name):
        kind = holder if isinstance(holder, type | ModuleType) else type(holder)
        refuse(f"{kind.__name__}.{name}", package)
    return getattr(holder, name)


def needed(path: str) -> Any:
    """What is at this dotted path in PyTorch, or what raises when it is called."""

    def missing(*_: Any, **__: Any) -> NoReturn:
        refuse(f"torch.{path}")

    return find(torch, path) or missing
