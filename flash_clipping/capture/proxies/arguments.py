"""Arguments of a torch function as a flat list, and back."""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor

from flash_clipping._compat import pytree

#: What holds no other arguments. Most functions get nothing else, and small layers wait for the
#: host: opening containers that are not there took it as long as the function itself.
_ATOMS = (Tensor, int, float, str, slice, NoneType, EllipsisType, torch.dtype, torch.device)


def flattened(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """All arguments in a row, and what :func:`unflattened` needs to put them back."""
    for arg in args:
        if not isinstance(arg, _ATOMS):
            break
    else:
        for arg in kwargs.values():
            if not isinstance(arg, _ATOMS):
                break
        else:
            return [*args, *kwargs.values()], tuple(kwargs)
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    return leaves, spec


def unflattened(leaves: list[Any], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and those by name."""
    if isinstance(spec, tuple):  # names
        positional = len(leaves) - len(spec)
        return tuple(leaves[:positional]), dict(zip(spec, leaves[positional:], strict=True))
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs
