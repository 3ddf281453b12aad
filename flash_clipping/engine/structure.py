"""The modules of a wrapped model: layers that come after wrapping have no tap."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

from torch import nn

from flash_clipping.errors import FlashClippingError


class Structure:
    """The modules and parameters of a model as it was wrapped.

    ``root`` is the wrapper, or the model itself where it is not wrapped; ``modules`` are all that
    were there when this was last looked at.
    """

    def __init__(self, root: nn.Module):
        self.root = root
        self._look()
        #: Modules that had parameters, and so have a tap, or a parent that serves them.
        self._served = {
            module
            for module in self.modules
            if any(param is not None for param in module._parameters.values())
        }

    def _look(self) -> None:
        self.modules = [*self.root.modules()]
        self._parts = self._parts_now()

    def _parts_now(self) -> list[nn.Module | nn.Parameter | None]:
        """Children and parameters of all modules that are known."""
        # Flat: walking the tree of modules takes milliseconds in every step.
        held: list[Any] = []
        for module in self.modules:
            held += (module._modules, module._parameters)
        return [*chain.from_iterable(map(operator.methodcaller("values"), filter(None, held)))]

    def check(self) -> None:
        """Raise ``FlashClippingError`` for trainable parameters that have come since the model was
        wrapped, in a module that has no tap."""
        before, now = self._parts, self._parts_now()
        # Lists of tensors cannot be compared by ==, and modules need not be.
        if len(before) == len(now) and all(map(operator.is_, before, now)):
            return
        for path, module in self.root.named_modules():
            if module in self._served:
                continue
            for name, param in module._parameters.items():
                if param is not None and param.requires_grad:
                    where = path.removeprefix("_module.") or "the model"
                    raise FlashClippingError(
                        f"{where} ({type(module).__name__}): its parameter {name!r} came after the "
                        "model was wrapped, so its gradients would not be clipped. Wrap the model "
                        "(make_private) when it is complete: take the wrapper off with "
                        "to_standard_module() (or cleanup()), change the model, and wrap it again. "
                        "What is no part of the model goes elsewhere than onto the wrapper."
                    )
        self._look()
