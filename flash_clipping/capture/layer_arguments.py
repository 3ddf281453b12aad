"""What a layer was called with, in the order in which its rule takes it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

from flash_clipping._compat import pytree
from flash_clipping.errors import FlashClippingError, to_freeze
from flash_clipping.rules.registry import Rule

_signature_of = functools.lru_cache(maxsize=1024)(inspect.signature)


def positional(
    layer: nn.Module, path: str, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """All that a layer was called with, in the order in which its rule takes it.

    Raises:
        FlashClippingError: the rule does not take some of it, or could not give its gradient.
    """
    if kwargs:
        signature = _signature_of(type(layer).forward)
        bound = signature.bind(layer, *args, **kwargs)
        given = set(bound.arguments)
        bound.apply_defaults()
        ordered: list[Any] = []
        count = 0  # without the defaults at the end, which a rule need not take
        for name, parameter in [*signature.parameters.items()][1:]:
            value = bound.arguments[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                ordered += value
            elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
                if name in given and value is not parameter.default:
                    names = value if parameter.kind is parameter.VAR_KEYWORD else [name]
                    _refuse(path, rule, ", ".join(map(repr, names)))
                continue
            else:
                ordered.append(value)
            if name in given:
                count = len(ordered)
        args = tuple(ordered[:count])
    if len(args) > 1:
        if error := _error_of(rule.forward, len(args)):
            _refuse(path, rule, f"{len(args)} arguments ({error})")
        for x in args:
            held = () if isinstance(x, Tensor) else pytree.tree_leaves(x)
            if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in held):
                _refuse(path, rule, f"a {type(x).__name__} of tensors that need grad")
    return args


@functools.lru_cache(maxsize=1024)
def _error_of(forward: Callable[..., Any], count: int) -> str:
    """Why this forward of a rule does not take so many arguments of a layer, if it does not."""
    try:
        _signature_of(forward).bind(*[None] * (1 + count))
    except TypeError as error:
        return str(error)
    return ""


def _refuse(path: str, rule: Rule, found: str) -> NoReturn:
    raise FlashClippingError(
        f"{path}: it was called with {found}, which its rule {type(rule).__name__} does "
        "not take; it would be lost. Call the layer without, write a rule whose forward takes "
        "it (flash_clipping.register_rule), or freeze the layer's parameters."
        f"{to_freeze(path)}"
    )
