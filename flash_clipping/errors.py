"""What is raised where going on would give a wrong norm."""

from __future__ import annotations


class FlashClippingError(RuntimeError):
    """A model or a step that would give a wrong norm; the message says what to change."""


def module_at(path: str) -> str:
    """Code for the module of a model that a message names: its path, or ``path (Type)``."""
    path = path.partition(" (")[0]
    return "model" if path in ("", "the model") else f'model.get_submodule("{path}")'
