"""Functions that are known to keep the samples apart, of what is the same for all of them.

Each returns whether it serves the call, and the result.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.compiled.unbatched.tensor import (
    SameRows,
    Unbatched,
    memory_of,
    of_kind,
    path_of,
    plain,
    rows_of,
    seen_shape,
)

# -- what is asked of one --------------------------------------------------------------------------


def _size(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    shape = seen_shape(args[0])
    place = args[1] if len(args) > 1 else kwargs.get("dim")
    return True, shape if place is None else shape[place]


def _dim(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    return True, len(seen_shape(args[0]))


def _is_floating_point(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[bool, Any]:
    return True, memory_of(args[0]).is_floating_point()


def _detach(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    return _like(args[0], memory_of(args[0]).detach())


# -- functions of one of them ----------------------------------------------------------------------


def _like(z: Tensor, d: Tensor) -> tuple[bool, Any]:
    kind = SameRows if isinstance(z, SameRows) else Unbatched
    return True, of_kind(kind, d, path_of(z))


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """A function that computes every element of its first argument by itself."""
    z, rest = args[0], args[1:]
    if not isinstance(z, Unbatched) or any([isinstance(x, Tensor) for x in rest]):
        return False, None
    return _like(z, func(memory_of(z), *rest, **kwargs))


def _to(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """Of a tensor that is an argument, only the dtype and the device are used."""
    z, rest = args[0], plain(args[1:])
    if isinstance(z, Unbatched):
        return _like(z, func(memory_of(z), *rest, **kwargs))
    return True, func(z, *rest, **kwargs)


def _dropout(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", True)
    return p == 0 or not training, args[0]


def _axis(place: int, axes: int) -> int:
    return place + axes if place < 0 else place


def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    z, place = args[0], args[1] if len(args) > 1 else kwargs["dim"]
    place = _axis(place, len(seen_shape(z)) + 1)
    if isinstance(z, SameRows) and place > 0:
        return _like(z, memory_of(z).unsqueeze(place))
    return True, of_kind(Unbatched, rows_of(z).unsqueeze(place + 1), path_of(z))


def _transpose(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    if len(args) != 3:
        return False, None
    z, axes = args[0], len(seen_shape(args[0]))
    i, j = _axis(args[1], axes), _axis(args[2], axes)
    if isinstance(z, SameRows) and i > 0 and j > 0:
        return _like(z, memory_of(z).transpose(i, j))
    return True, of_kind(Unbatched, rows_of(z).transpose(i + 1, j + 1), path_of(z))


def _sizes_in(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``x.view(2, 3)`` or ``x.view((2, 3))``."""
    if len(args) == 1 and isinstance(args[0], tuple | list):
        return tuple(args[0])
    return tuple(args)


def _permute(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    z = args[0]
    axes = len(seen_shape(z))
    order = [_axis(place, axes) for place in _sizes_in(args[1:])]
    if len(order) != axes:
        return False, None
    return True, of_kind(
        Unbatched, rows_of(z).permute(0, *[place + 1 for place in order]), path_of(z)
    )


def _reshape(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    z, sizes = args[0], _sizes_in(args[1:])
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return False, None
    d = rows_of(z)
    return True, of_kind(Unbatched, d.reshape(d.shape[0], *sizes), path_of(z))


def _getitem(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    z, index = args
    if not isinstance(index, tuple):
        index = (index,)
    for part in index:
        if isinstance(part, bool) or not (
            part is None or part is Ellipsis or isinstance(part, int | slice)
        ):
            return False, None
    if isinstance(z, SameRows) and isinstance(index[0], slice) and index[0] == slice(None):
        return _like(z, memory_of(z)[index])
    return True, of_kind(Unbatched, rows_of(z)[(slice(None), *index)], path_of(z))


def _expand(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    return _expanded(args[0], _sizes_in(args[1:]))


def _expand_as(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    z, other = args
    if not isinstance(z, Unbatched):
        return True, z.expand(seen_shape(other))
    like = seen_shape(other) if isinstance(other, Unbatched) else other.shape
    return _expanded(z, tuple(like))


def _expanded(z: Tensor, sizes: tuple[Any, ...]) -> tuple[bool, Any]:
    shape, B = seen_shape(z), memory_of(z).shape[0]
    more = len(sizes) - len(shape)
    if not sizes or more < 0:
        return False, None
    if isinstance(z, SameRows) and more == 0 and (sizes[0] == -1 or sizes[0] == B):
        return _like(z, memory_of(z).expand(B, *sizes[1:]))
    d = rows_of(z)
    if sizes[0] == B and (more > 0 or shape[0] == 1):  # a row for each sample
        if more > 0:
            d = d.reshape(B, *[1] * (more - 1), *shape)
        else:
            d = d.select(1, 0)
        return True, of_kind(SameRows, d.expand(B, *sizes[1:]), path_of(z))
    d = d.reshape(B, *[1] * more, *shape).expand(B, *sizes)
    return True, of_kind(Unbatched, d, path_of(z))


def _repeat(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    z, sizes = args[0], _sizes_in(args[1:])
    d, shape = rows_of(z), seen_shape(z)
    B, more = d.shape[0], len(sizes) - len(shape)
    if not sizes or more < 0:
        return False, None
    if sizes[0] == B and more == 1:
        return True, of_kind(SameRows, d.repeat(1, *sizes[1:]), path_of(z))
    if sizes[0] == B and more == 0 and shape[0] == 1:
        return True, of_kind(SameRows, d.select(1, 0).repeat(1, *sizes[1:]), path_of(z))
    d = d.reshape(B, *[1] * more, *shape).repeat(1, *sizes)
    return True, of_kind(Unbatched, d, path_of(z))


# -- functions of one of them and samples ----------------------------------------------------------


def _aligned(z: Tensor, axes: int) -> Tensor | None:
    """Row ``b`` as what sample ``b`` meets, in a function of tensors with so many axes that
    broadcasts; None where its first axis would meet the samples."""
    d = memory_of(z)
    if isinstance(z, SameRows):
        if d.dim() == axes:
            return d
        d = rows_of(z)
    B, shape = d.shape[0], d.shape[1:]
    if len(shape) > axes or axes == 0:
        return None
    if len(shape) == axes:
        return d.select(1, 0) if shape[0] == 1 else None
    return d.reshape(B, *[1] * (axes - 1 - len(shape)), *shape)


def _is_scalar(x: Any) -> bool:
    return not isinstance(x, Tensor) or (x.dim() == 0 and not x.requires_grad)


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """A function that broadcasts and computes every element by itself."""
    sames = [x for x in args if isinstance(x, Unbatched)]
    others = [x for x in args if not (isinstance(x, Unbatched) or _is_scalar(x))]
    if not others:
        return _together(func, args, kwargs, sames)
    B, axes = memory_of(sames[0]).shape[0], max([x.dim() for x in others])
    if axes == 0:
        return False, None
    for x in others:
        if isinstance(x, nn.Parameter) or x.dim() != axes or x.shape[0] != B:
            return False, None
    found: list[Any] = []
    for x in args:
        if isinstance(x, Unbatched):
            row = _aligned(x, axes)
            if row is None:
                return False, None
            found.append(row)
        else:
            found.append(x)
    return True, func(*found, **kwargs)


def _together(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], sames: Sequence[Tensor]
) -> tuple[bool, Any]:
    path = path_of(sames[0])
    axes = max([len(seen_shape(x)) for x in sames])
    if any([isinstance(x, SameRows) and len(seen_shape(x)) == axes for x in sames]):
        rows = [_aligned(x, axes) if isinstance(x, Unbatched) else x for x in args]
        if all([row is not None for row in rows]):
            return True, of_kind(SameRows, func(*rows, **kwargs), path)
    found: list[Any] = []
    for x in args:
        if isinstance(x, Unbatched):
            d = rows_of(x)
            x = d.reshape(d.shape[0], *[1] * (axes + 1 - d.dim()), *d.shape[1:])
        found.append(x)
    return True, of_kind(Unbatched, func(*found, **kwargs), path)


def _in_place(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """``x += z``"""
    if isinstance(args[0], Unbatched) or not isinstance(args[0], Tensor):
        return False, None
    return _pointwise(func, args, kwargs)


def _cat(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    parts = args[0] if args else kwargs.get("tensors", ())
    place = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    sames = [x for x in parts if isinstance(x, Unbatched)]
    others = [x for x in parts if not isinstance(x, Unbatched)]
    if not sames or not isinstance(place, int):
        return False, None
    path, axes = path_of(sames[0]), len(seen_shape(sames[0]))
    place = _axis(place, axes)
    rows = all([isinstance(x, SameRows) for x in sames])
    if others:
        B = memory_of(sames[0]).shape[0]
        if not rows or place < 1:
            return False, None
        for x in others:
            if isinstance(x, nn.Parameter) or x.dim() != axes or x.shape[0] != B:
                return False, None
    elif not rows or place < 1:
        return True, of_kind(Unbatched, torch.cat([rows_of(x) for x in parts], place + 1), path)
    found = torch.cat([memory_of(x) if isinstance(x, Unbatched) else x for x in parts], place)
    return True, found if others else of_kind(SameRows, found, path)


FUNCTIONS: dict[str, Callable[..., tuple[bool, Any]]] = {
    "to": _to,
    "type_as": _to,
    "size": _size,
    "dim": _dim,
    "is_floating_point": _is_floating_point,
    "detach": _detach,
    "dropout": _dropout,
    "unsqueeze": _unsqueeze,
    "transpose": _transpose,
    "permute": _permute,
    "view": _reshape,
    "reshape": _reshape,
    "__getitem__": _getitem,
    "getitem": _getitem,
    "expand": _expand,
    "expand_as": _expand_as,
    "repeat": _repeat,
    "where": _pointwise,
    "cat": _cat,
    "concat": _cat,
    "concatenate": _cat,
    **dict.fromkeys(
        (
            *("float", "double", "half", "bfloat16", "contiguous", "clone", "neg", "__neg__"),
            *("exp", "log", "sqrt", "rsqrt", "square", "abs", "sin", "cos", "clamp"),
            *("sigmoid", "tanh", "relu", "gelu", "silu", "softplus"),
        ),
        _elementwise,
    ),
    **dict.fromkeys(
        (
            *("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub", "subtract"),
            *("mul", "__mul__", "__rmul__", "multiply"),
            *("div", "__div__", "__truediv__", "__rtruediv__", "__rdiv__", "true_divide", "divide"),
        ),
        _pointwise,
    ),
    **dict.fromkeys(("add_", "__iadd__", "sub_", "__isub__", "mul_", "__imul__"), _in_place),
}
