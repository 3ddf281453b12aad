"""Modules that are no layers, and run inside of a context that was registered for their type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from flash_clipping.capture.declared_rows import picked_rows
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import RefusedByRule, Tap
from flash_clipping.rules import find_scope, is_list_of_experts
from flash_clipping.rules.registry import Scope, UnsupportedLayer


class ScopedForward(Tap):
    """Stands in for the ``forward`` of a module with a registered scope; taps nothing itself."""

    def __init__(self, module: nn.Module, path: str, scope: Scope, session: ClippingSession):
        super().__init__(module, path, None, session)
        self.scope = scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.scope(self.layer, *args, **kwargs) as note:
                output = self.original(*args, **kwargs)
                if note is not None:
                    note(output)
                return output
        except UnsupportedLayer as error:
            raise RefusedByRule(self.path, error) from error


def scope_of(module: nn.Module, session: ClippingSession) -> Scope | None:
    """What such a module runs in, if anything."""
    if not is_list_of_experts(module):
        return find_scope(module)

    @contextmanager
    def of_experts(
        _: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        call = session.current_forward
        count = session.samples() if call is None else call.batch_size
        is_recorded = session.enabled and not session.bypassed
        with picked_rows(hidden_states, count) if is_recorded and count else nullcontext():
            yield

    return of_experts
