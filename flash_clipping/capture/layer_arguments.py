"""What a layer was called with, in the order in which its rule takes it."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

from torch import Tensor, nn

from flash_clipping._compat import pytree
from flash_clipping.errors import FlashClippingError, to_freeze
from flash_clipping.rules.registry import Rule


class LayerArguments:
    """Arguments of one layer with a rule.

    Args:
        layer: the layer.
        path: its name in the model, for messages.
    """

    def __init__(self, layer: nn.Module, path: str):
        self.layer = layer
        self.path = path
        self._signature: inspect.Signature | None = None
        self._taken: inspect.Signature | None = None  # arguments that the rule takes

    def positional(
        self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """All that the layer was called with, in the order in which its rule takes it.

        Raises:
            FlashClippingError: the rule does not take some of it, or could not give its gradient.
        """
        if kwargs:
            if self._signature is None:
                self._signature = inspect.signature(type(self.layer).forward)
            bound = self._signature.bind(self.layer, *args, **kwargs)
            given = set(bound.arguments)
            bound.apply_defaults()
            ordered: list[Any] = []
            count = 0  # without the defaults at the end, which a rule need not take
            for name, parameter in [*self._signature.parameters.items()][1:]:
                value = bound.arguments[name]
                if parameter.kind is parameter.VAR_POSITIONAL:
                    ordered += value
                elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
                    if name in given and value is not parameter.default:
                        names = value if parameter.kind is parameter.VAR_KEYWORD else [name]
                        self._refuse(rule, ", ".join(map(repr, names)))
                    continue
                else:
                    ordered.append(value)
                if name in given:
                    count = len(ordered)
            args = tuple(ordered[:count])
        if len(args) > 1:
            if self._taken is None:
                self._taken = inspect.signature(rule.forward)
            try:
                self._taken.bind(self.layer, *args)
            except TypeError as error:
                self._refuse(rule, f"{len(args)} arguments ({error})")
            for x in args:
                held = () if isinstance(x, Tensor) else pytree.tree_leaves(x)
                if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in held):
                    self._refuse(rule, f"a {type(x).__name__} of tensors that need grad")
        return args

    def _refuse(self, rule: Rule, found: str) -> NoReturn:
        raise FlashClippingError(
            f"{self.path}: it was called with {found}, which its rule {type(rule).__name__} does "
            "not take; it would be lost. Call the layer without, write a rule whose forward takes "
            "it (flash_clipping.register_rule), or freeze the layer's parameters."
            f"{to_freeze(self.path)}"
        )
