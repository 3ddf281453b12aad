"""Modules that are no layers, and run inside of a context that was registered for their type."""

from __future__ import annotations

from typing import Any

from torch import nn

from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.rules.registry import Scope


class ScopedForward(Tap):
    """Stands in for the ``forward`` of a module with a registered scope; taps nothing itself."""

    def __init__(self, module: nn.Module, path: str, scope: Scope, session: ClippingSession):
        super().__init__(module, path, None, session)
        self.scope = scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.scope(self.layer, *args, **kwargs):
            return self.original(*args, **kwargs)
