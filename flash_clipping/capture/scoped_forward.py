"""Modules that are no layers, and run inside of a context that was registered for their type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping.capture.declared_rows import picked_rows
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import RefusedByRule, Tap
from flash_clipping.rules.registry import (
    Scope,
    UnsupportedLayer,
    declaring_scopes,
    find_scope,
    picks_rows,
)


class ScopedForward(Tap):
    """Stands in for the ``forward`` of a module with a scope; taps nothing itself.

    ``declares``: the scope declares rows, which nothing can do inside a compiled region.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        scope: Scope,
        session: ClippingSession,
        declares: bool = False,
    ):
        super().__init__(module, path, None, session)
        self.scope, self.declares = scope, declares

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.declares and is_dynamo_compiling():
            return self.original(*args, **kwargs)
        try:
            with self.scope(self.layer, *args, **kwargs) as note:
                output = self.original(*args, **kwargs)
                if note is not None:
                    note(output)
                return output
        except UnsupportedLayer as error:
            raise RefusedByRule(self.path, error) from error


def scoped_forwards(root: nn.Module, session: ClippingSession) -> dict[nn.Module, ScopedForward]:
    """Stand-ins for the forwards of all modules below that have a scope."""
    declaring = declaring_scopes(root)
    found = {}
    for path, module in root.named_modules():
        if picks_rows(module):
            declaring[module] = partial(_picking_rows, session)
        declares = module in declaring
        scope = declaring.get(module) or find_scope(module)
        if scope is not None:
            found[module] = ScopedForward(module, path, scope, session, declares)
    return found


@contextmanager
def _picking_rows(
    session: ClippingSession, _: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Iterator[None]:
    """Layers inside read the rows that the module picks from its tokens."""
    call = session.current_forward
    count = session.samples() if call is None else call.batch_size
    is_recorded = session.enabled and not session.bypassed
    with picked_rows(hidden_states, count) if is_recorded and count else nullcontext():
        yield
