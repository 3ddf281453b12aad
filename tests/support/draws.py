"""What a private loader drew."""

from __future__ import annotations

from typing import Any


def drawn(module: Any) -> int:
    """How many samples, or units, the batch has that the loader of a private model, or of its
    hooks, gave last. Where it has none, its row is nobody's."""
    samples: int = module._session.rows.draws.waiting[-1].samples
    return samples
