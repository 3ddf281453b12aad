"""What is raised where going on would give a wrong norm."""

from __future__ import annotations


class FlashClippingError(RuntimeError):
    """A model or a step that would give a wrong norm; the message says what to change."""
