"""What is the same for all samples, inside compiled regions.

An embedding of positions reads ids that do not derive from the batch, ``[1, T]``, and a module adds
its own parameter to what it is given. Neither has a row for each sample, so the gradient that
arrives there is a sum over samples. Here such a value has one more axis, ``[B, *shape]``: all rows
are alike, and the gradient of row ``b`` is that of sample ``b``. The model does not see it: it
gets a :class:`SameForAll`, a tensor subclass that says to be of ``shape`` and runs functions on the
memory behind it. Where one meets samples, ``x + z``, row ``b`` meets
sample ``b``, and what comes out are samples.

Dynamo traces all of it away: what is left are views and the model's own operators. Only functions
that are known to keep the samples apart are served. Any other is found when the region is run
uncompiled to learn its shapes (the layers then have no wires), and is an error where it is found
later.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping._compat import (
    constant_in_traces,
    is_traced_once,
    plain_functions,
    tracing_context,
    transforms_are_active,
)
from flash_clipping.capture.bare import BareParameter
from flash_clipping.capture.bare.operation import name_of
from flash_clipping.capture.bare.stand_in import circumstances
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.errors import FlashClippingError


class SameForAll(torch.Tensor):
    """``[B, *shape]`` in memory; the model sees ``shape``."""

    #: Told apart by this from what stands in for parameters outside of regions.
    inside_regions = True

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with plain_functions():
            return _run(func, args, kwargs or {})


class SameRows(SameForAll):
    """What was expanded over the batch: the model sees ``[B, *row]``, which is what it is."""


class _Learning(threading.local):
    #: While a region learns what its layers see: why what is the same for all cannot be served.
    found: list[str] | None = None
    #: The modules, by path, whose parameters functions were called with.
    used: set[str] = set()  # noqa: RUF012 (one for each thread as soon as it learns)
    #: What a checkpoint changes, as it was outside of any.
    outside: Any = None


_learning = _Learning()


@contextmanager
def noting_misuse() -> Iterator[list[str]]:
    """While the body runs, functions that are not served run as they would have; they are noted."""
    before = _learning.found, _learning.used, _learning.outside
    found: list[str] = []
    _learning.found, _learning.used, _learning.outside = found, set(), circumstances()
    try:
        yield found
    finally:
        _learning.found, _learning.used, _learning.outside = before


def was_used(path: str) -> bool:
    """Whether a function was called with what comes from the module at ``path``."""
    return path in _learning.used


def is_checkpointed() -> bool:
    """Whether an activation checkpoint inside of the region runs."""
    return bool(_learning.outside != circumstances())


def without_same(
    path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer that takes samples only, as they would have been."""
    leaves = [*_leaves(args), *_leaves(kwargs.values())]
    if any(isinstance(x, SameForAll) for x in leaves) and _learning.found is not None:
        _learning.found.append(f"{path} is called with what is computed from constants alone")
    return _plain(args), {key: _plain(value) for key, value in kwargs.items()}


def same_for_all(x_B: Tensor, path: str) -> Tensor:
    """``[B, *shape]``, of which the model sees ``shape``. It comes from the module at ``path``."""
    return _of(SameForAll, x_B, path)


def _of(kind: type[SameForAll], x_B: Tensor, path: str) -> Tensor:
    found = x_B.as_subclass(kind)
    if not is_dynamo_compiling():  # Dynamo has no place for it
        found.path = path  # type: ignore[attr-defined]
    return found


def _path_of(z: Tensor) -> str:
    return "" if is_dynamo_compiling() else getattr(z, "path", "")


def memory_of(z: Tensor) -> Tensor:
    """The plain tensor, ``[B, ...]``."""
    # as_subclass(Tensor) is nothing that Dynamo takes.
    with plain_functions():
        return torch.select(z.unsqueeze(0), 0, 0)


def rows_of(z: Tensor) -> Tensor:
    """``[B, *shape]``, also of what was expanded over the batch."""
    d = memory_of(z)
    if isinstance(z, SameRows):
        with plain_functions():
            d = d.unsqueeze(1).expand(d.shape[0], d.shape[0], *d.shape[1:])
    return d


def _seen_shape(z: Tensor) -> Any:
    d = memory_of(z)
    return d.shape if isinstance(z, SameRows) else d.shape[1:]


def _plain(x: Any) -> Any:
    """What the model would have had without this."""
    if isinstance(x, SameRows):
        return memory_of(x)
    if isinstance(x, SameForAll):
        return torch.select(memory_of(x), 0, 0)
    if type(x) in (tuple, list):
        return type(x)([_plain(part) for part in x])
    return x


@constant_in_traces
def _apart() -> bool:
    """Whether what is traced now keeps the samples where they are: no transform of torch.func, and
    no body of an operator that is run several times."""
    return not transforms_are_active() and (tracing_context() is None or is_traced_once())


class _NotServed(Exception):
    """A function that may not keep the samples apart."""


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name = name_of(func)
    if name in _ATTRIBUTES:
        return _attribute(_ATTRIBUTES[name], args[0])
    if not is_dynamo_compiling():
        note_use(args, kwargs)
    serve = _SERVED.get(name)
    if serve is not None and _is_known_call(args, kwargs) and _apart():
        served, result = serve(func, args, kwargs)
        if served:
            return result
    return _refuse(func, name, args, kwargs)


def _is_known_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether all tensors are where the functions below look for them, and none of them is computed
    from parameters outside of the region."""
    if len(args) == 0 or any([isinstance(x, Tensor | tuple | list) for x in kwargs.values()]):
        return False
    # Inside of a trace there is none: layers that run by themselves break the graph.
    return is_dynamo_compiling() or not any(isinstance(x, BareParameter) for x in _leaves(args))


def note_use(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Something is computed with these."""
    for x in [*_leaves(args), *_leaves(kwargs.values())]:
        if isinstance(x, SameForAll) and _learning.found is not None:
            _learning.used.add(_path_of(x))


def note_escaped(output: Any) -> None:
    """What a region returns leaves it: outside, a row for each sample is nothing that is known."""
    for x in tensors_in(output):
        if isinstance(x, SameForAll):
            if _learning.found is None:
                _raise(_path_of(x), "return")
            _learning.found.append(f"the region returns what {_path_of(x)} computes")


def _refuse(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    leaves = [*_leaves(args), *_leaves(kwargs.values())]
    path = next((_path_of(x) for x in leaves if isinstance(x, SameForAll)), "")
    if is_dynamo_compiling() or _learning.found is None:
        _raise(path, name)
    _learning.found.append(
        f"{name} is called with what {path or 'a layer'} computes from constants or parameters"
    )
    named = {key: _plain(value) for key, value in kwargs.items()}
    return func(*_plain(args), **named)


def _raise(path: str, name: str) -> NoReturn:
    raise FlashClippingError(
        f"{path or 'a compiled layer'}: it computes what is the same for all samples (from ids of "
        f"positions, or from parameters alone), and {name} is called with it, which flash clipping "
        "does not serve in a compiled graph. Leave fullgraph out and call the layer outside of "
        "what is compiled, expand what it reads over the batch, x.expand(batch_size, ...), or "
        "freeze its parameters."
    )


def _leaves(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, tuple | list):
            found += value
        else:
            found.append(value)
    return found


# -- what is asked of it ---------------------------------------------------------------------------

_ATTRIBUTES = {
    f"__get__{name}": name
    for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "layout")
}


def _attribute(name: str, z: Tensor) -> Any:
    if name == "shape":
        return _seen_shape(z)
    if name == "ndim":
        return len(_seen_shape(z))
    return getattr(memory_of(z), name)


# Each of these returns whether it serves the call, and the result.


def _size(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    shape = _seen_shape(args[0])
    place = args[1] if len(args) > 1 else kwargs.get("dim")
    return True, shape if place is None else shape[place]


def _dim(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    return True, len(_seen_shape(args[0]))


def _is_floating_point(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[bool, Any]:
    return True, memory_of(args[0]).is_floating_point()


def _detach(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    return _like(args[0], memory_of(args[0]).detach())


# -- functions of one of them ----------------------------------------------------------------------


def _like(z: Tensor, d: Tensor) -> tuple[bool, Any]:
    kind = SameRows if isinstance(z, SameRows) else SameForAll
    return True, _of(kind, d, _path_of(z))


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """A function that computes every element of its first argument by itself."""
    z, rest = args[0], args[1:]
    if not isinstance(z, SameForAll) or any([isinstance(x, Tensor) for x in rest]):
        return False, None
    return _like(z, func(memory_of(z), *rest, **kwargs))


def _to(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """Of a tensor that is an argument, only the dtype and the device are used."""
    z, rest = args[0], _plain(args[1:])
    if isinstance(z, SameForAll):
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
    place = _axis(place, len(_seen_shape(z)) + 1)
    if isinstance(z, SameRows) and place > 0:
        return _like(z, memory_of(z).unsqueeze(place))
    return True, _of(SameForAll, rows_of(z).unsqueeze(place + 1), _path_of(z))


def _transpose(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    if len(args) != 3:
        return False, None
    z, axes = args[0], len(_seen_shape(args[0]))
    i, j = _axis(args[1], axes), _axis(args[2], axes)
    if isinstance(z, SameRows) and i > 0 and j > 0:
        return _like(z, memory_of(z).transpose(i, j))
    return True, _of(SameForAll, rows_of(z).transpose(i + 1, j + 1), _path_of(z))


def _sizes_in(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``x.view(2, 3)`` or ``x.view((2, 3))``."""
    if len(args) == 1 and isinstance(args[0], tuple | list):
        return tuple(args[0])
    return tuple(args)


def _permute(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    z = args[0]
    axes = len(_seen_shape(z))
    order = [_axis(place, axes) for place in _sizes_in(args[1:])]
    if len(order) != axes:
        return False, None
    return True, _of(
        SameForAll, rows_of(z).permute(0, *[place + 1 for place in order]), _path_of(z)
    )


def _reshape(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    z, sizes = args[0], _sizes_in(args[1:])
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return False, None
    d = rows_of(z)
    return True, _of(SameForAll, d.reshape(d.shape[0], *sizes), _path_of(z))


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
    return True, _of(SameForAll, rows_of(z)[(slice(None), *index)], _path_of(z))


def _expand(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    return _expanded(args[0], _sizes_in(args[1:]))


def _expand_as(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    z, other = args
    if not isinstance(z, SameForAll):
        return True, z.expand(_seen_shape(other))
    like = _seen_shape(other) if isinstance(other, SameForAll) else other.shape
    return _expanded(z, tuple(like))


def _expanded(z: Tensor, sizes: tuple[Any, ...]) -> tuple[bool, Any]:
    shape, B = _seen_shape(z), memory_of(z).shape[0]
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
        return True, _of(SameRows, d.expand(B, *sizes[1:]), _path_of(z))
    d = d.reshape(B, *[1] * more, *shape).expand(B, *sizes)
    return True, _of(SameForAll, d, _path_of(z))


def _repeat(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    z, sizes = args[0], _sizes_in(args[1:])
    d, shape = rows_of(z), _seen_shape(z)
    B, more = d.shape[0], len(sizes) - len(shape)
    if not sizes or more < 0:
        return False, None
    if sizes[0] == B and more == 1:
        return True, _of(SameRows, d.repeat(1, *sizes[1:]), _path_of(z))
    if sizes[0] == B and more == 0 and shape[0] == 1:
        return True, _of(SameRows, d.select(1, 0).repeat(1, *sizes[1:]), _path_of(z))
    d = d.reshape(B, *[1] * more, *shape).repeat(1, *sizes)
    return True, _of(SameForAll, d, _path_of(z))


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
    sames = [x for x in args if isinstance(x, SameForAll)]
    others = [x for x in args if not (isinstance(x, SameForAll) or _is_scalar(x))]
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
        if isinstance(x, SameForAll):
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
    path = _path_of(sames[0])
    axes = max([len(_seen_shape(x)) for x in sames])
    if any([isinstance(x, SameRows) and len(_seen_shape(x)) == axes for x in sames]):
        rows = [_aligned(x, axes) if isinstance(x, SameForAll) else x for x in args]
        if all([row is not None for row in rows]):
            return True, _of(SameRows, func(*rows, **kwargs), path)
    found: list[Any] = []
    for x in args:
        if isinstance(x, SameForAll):
            d = rows_of(x)
            x = d.reshape(d.shape[0], *[1] * (axes + 1 - d.dim()), *d.shape[1:])
        found.append(x)
    return True, _of(SameForAll, func(*found, **kwargs), path)


def _in_place(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """``x += z``"""
    if isinstance(args[0], SameForAll) or not isinstance(args[0], Tensor):
        return False, None
    return _pointwise(func, args, kwargs)


def _cat(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    parts = args[0] if args else kwargs.get("tensors", ())
    place = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    sames = [x for x in parts if isinstance(x, SameForAll)]
    others = [x for x in parts if not isinstance(x, SameForAll)]
    if not sames or not isinstance(place, int):
        return False, None
    path, axes = _path_of(sames[0]), len(_seen_shape(sames[0]))
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
        return True, _of(SameForAll, torch.cat([rows_of(x) for x in parts], place + 1), path)
    found = torch.cat([memory_of(x) if isinstance(x, SameForAll) else x for x in parts], place)
    return True, found if others else _of(SameRows, found, path)


_SERVED: dict[str, Callable[..., tuple[bool, Any]]] = {
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
