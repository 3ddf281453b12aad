"""Which factors a step keeps, by the type of the layer that they are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from flash_clipping.finish.backward_pass import BackwardPass


def recorded_factors(model: nn.Module, step: Callable[[], Any]) -> dict[str, set[str]]:
    """Names of layer types -> names of factor types, of one step of a wrapped ``model``."""
    found: dict[str, set[str]] = {}

    class Watched(BackwardPass):
        def record(self, path: str, params: Sequence[Any], factors: Any, *rest: Any) -> None:
            kinds = found.setdefault(path.rpartition("(")[2].rstrip(")"), set())
            kinds.update(type(factor).__name__ for factor in factors)
            super().record(path, params, factors, *rest)

    taps = [vars(module).get("forward") for module in model.modules()]
    session = next(tap.session for tap in taps if hasattr(tap, "session"))
    before, session.calls.backward_pass_class = session.calls.backward_pass_class, Watched
    try:
        step()
    finally:
        session.calls.backward_pass_class = before
    return found
