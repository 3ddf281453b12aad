"""Stand-ins for the forward of the model itself."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from flash_clipping.capture.refused_forwards import NoRenormalisation
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.errors import TO_EXPORT, NoAttribute


class RootForward(Tap):
    """Stands in for the root module's ``forward``, around its tap if it has one."""

    def __init__(self, root: nn.Module, session: ClippingSession):
        super().__init__(root, "", None, session)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model's own forward, which trainers choose arguments by."""
        forward = self.instance_forward
        while isinstance(forward, Tap):
            forward = forward.instance_forward
        if forward is None:
            forward = MethodType(type(self.layer).forward, self.layer)
        return inspect.signature(forward)

    def __getattr__(self, name: str) -> Any:
        raise NoAttribute(
            f"FC430 the forward of a private model has no {name!r}, which exports of PyTorch read. "
            f"{TO_EXPORT}"
        )


class WatchedForward(RootForward):
    """Refuses a model whose first forward writes into weights."""

    def __init__(self, root: nn.Module, session: ClippingSession):
        super().__init__(root, session)
        self.watched = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.watched or not self.session.recording or is_dynamo_compiling():
            return self.original(*args, **kwargs)
        with NoRenormalisation():
            output = self.original(*args, **kwargs)
        self.watched = True
        return output
