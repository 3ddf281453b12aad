"""What is the same for all samples, inside compiled regions.

An embedding of positions reads ids that do not derive from the batch, ``[1, T]``, and a module adds
its own parameter to what it is given. Neither has a row for each sample, so the gradient that
arrives there is a sum over samples. Here such a value has one more axis, ``[B, *shape]``: all rows
are alike, and the gradient of row ``b`` is that of sample ``b``. The model does not see it: it
gets a :class:`Unbatched`, a tensor subclass that says to be of ``shape`` and runs functions on the
memory behind it. Where one meets samples, ``x + z``, row ``b`` meets sample ``b``, and what comes
out are samples.

Dynamo traces all of it away: what is left are views and the model's own operators. Only functions
that are known to keep the samples apart are served (``_SERVED``). Any other is found when the
region is run uncompiled to learn its shapes (the layers then have no wires), and is an error where
it is found later.

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
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.proxies import ParameterProxy
from flash_clipping.capture.proxies.parameter_proxy import circumstances, name_of
from flash_clipping.errors import FlashClippingError


class Unbatched(torch.Tensor):
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


class SameRows(Unbatched):
    """What was expanded over the batch: the model sees ``[B, *row]``, which is what it is."""


def same_for_all(x_B: Tensor, path: str) -> Tensor:
    """``[B, *shape]``, of which the model sees ``shape``. It comes from the module at ``path``."""
    return _of_kind(Unbatched, x_B, path)


def _of_kind(kind: type[Unbatched], x_B: Tensor, path: str) -> Tensor:
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
    if isinstance(x, Unbatched):
        return torch.select(memory_of(x), 0, 0)
    if type(x) in (tuple, list):
        return type(x)([_plain(part) for part in x])
    return x


# -- what is noted while a region learns its shapes ------------------------------------------------


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


def note_use(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Something is computed with these."""
    if _learning.found is not None:
        _learning.used.update([_path_of(x) for x in _unbatched_in(args, kwargs)])


def note_escaped(output: Any) -> None:
    """What a region returns leaves it: outside, a row for each sample is nothing that is known."""
    for x in tensors_in(output):
        if isinstance(x, Unbatched):
            if _learning.found is None:
                _raise(_path_of(x), "return")
            _learning.found.append(f"the region returns what {_path_of(x)} computes")


def without_same(
    path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer that takes samples only, as they would have been."""
    if _learning.found is not None and _unbatched_in(args, kwargs):
        _learning.found.append(f"{path} is called with what is computed from constants alone")
    return _plain(args), {key: _plain(value) for key, value in kwargs.items()}


# -- functions of it -------------------------------------------------------------------------------

_ATTRIBUTES = {
    f"__get__{name}": name
    for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "layout")
}


def _attribute(name: str, z: Tensor) -> Any:
    if name == "shape":
        return _seen_shape(z)
    return len(_seen_shape(z)) if name == "ndim" else getattr(memory_of(z), name)


@constant_in_traces
def _apart() -> bool:
    """Whether what is traced now keeps the samples where they are: no transform of torch.func, and
    no body of an operator that is run several times."""
    return not transforms_are_active() and (tracing_context() is None or is_traced_once())


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name = name_of(func)
    if name in _ATTRIBUTES:
        return _attribute(_ATTRIBUTES[name], args[0])
    if not is_dynamo_compiling():
        note_use(args, kwargs)
    serve = _SERVED.get(name)
    if serve is not None and _is_known_call(args, kwargs) and _apart():
        try:
            result = serve(func, *args, **kwargs)
        except TypeError:  # other arguments
            result = NotImplemented
        if result is not NotImplemented:
            return result
    found = _unbatched_in(args, kwargs)
    path = _path_of(found[0]) if found else ""
    if is_dynamo_compiling() or _learning.found is None:
        _raise(path, name)
    _learning.found.append(
        f"{name} is called with what {path or 'a layer'} computes from constants or parameters"
    )
    named = {key: _plain(value) for key, value in kwargs.items()}
    return func(*_plain(args), **named)


def _is_known_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether all tensors are where the functions that are served look for them, and none of
    them is computed from parameters outside of the region."""
    if len(args) == 0 or any([isinstance(x, Tensor | tuple | list) for x in kwargs.values()]):
        return False
    # Inside of a trace there is none: layers that run by themselves break the graph.
    return is_dynamo_compiling() or not any(isinstance(x, ParameterProxy) for x in _leaves(args))


def _raise(path: str, name: str) -> NoReturn:
    raise FlashClippingError(
        f"{path or 'a compiled layer'}: it computes what is the same for all samples (from ids of "
        f"positions, or from parameters alone), and {name} is called with it, which flash clipping "
        "does not serve in a compiled graph. Leave fullgraph out and call the layer outside of "
        "what is compiled, expand what it reads over the batch, x.expand(batch_size, ...), or "
        "freeze its parameters."
    )


def _unbatched_in(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    leaves = [*_leaves(args), *_leaves(kwargs.values())]
    return [x for x in leaves if isinstance(x, Unbatched)]


def _leaves(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, tuple | list):
            found += value
        else:
            found.append(value)
    return found


# -- functions that are served; ``NotImplemented`` where a call is not -----------------------------
# Each takes the function itself, and then what that takes.


def _like(z: Tensor, d: Tensor) -> Tensor:
    return _of_kind(SameRows if isinstance(z, SameRows) else Unbatched, d, _path_of(z))


def _shaped(z: Tensor, keeps_first: bool, shape: Callable[[Tensor, int], Tensor]) -> Tensor:
    """A function of axes. ``shape`` is called with the memory, and how many axes that has before
    those that the model sees.

    ``keeps_first``: it leaves the first axis alone, which may be that of the rows.
    """
    if isinstance(z, SameRows) and keeps_first:
        return _like(z, shape(memory_of(z), 0))
    return _of_kind(Unbatched, shape(rows_of(z), 1), _path_of(z))


def _size(func: Any, z: Tensor, dim: int | None = None) -> Any:
    shape = _seen_shape(z)
    return shape if dim is None else shape[dim]


def _elementwise(func: Any, z: Any, *rest: Any, **kwargs: Any) -> Any:
    """A function that computes every element of its first argument by itself."""
    if not isinstance(z, Unbatched) or any([isinstance(x, Tensor) for x in rest]):
        return NotImplemented
    return _like(z, func(memory_of(z), *rest, **kwargs))


def _to(func: Any, z: Tensor, *rest: Any, **kwargs: Any) -> Any:
    """Of a tensor that is an argument, only the dtype and the device are used."""
    if isinstance(z, Unbatched):
        return _like(z, func(memory_of(z), *_plain(rest), **kwargs))
    return func(z, *_plain(rest), **kwargs)


def _dropout(
    func: Any, z: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    return z if p == 0 or not training else NotImplemented


def _axis(place: int, axes: int) -> int:
    return place + axes if place < 0 else place


def _unsqueeze(func: Any, z: Tensor, dim: int) -> Any:
    place = _axis(dim, len(_seen_shape(z)) + 1)
    return _shaped(z, place > 0, lambda d, more: d.unsqueeze(place + more))


def _transpose(func: Any, z: Tensor, dim0: int, dim1: int) -> Any:
    axes = len(_seen_shape(z))
    i, j = _axis(dim0, axes), _axis(dim1, axes)
    return _shaped(z, i > 0 and j > 0, lambda d, more: d.transpose(i + more, j + more))


def _sizes_in(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """``x.view(2, 3)`` or ``x.view((2, 3))``."""
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        return tuple(sizes[0])
    return sizes


def _permute(func: Any, z: Tensor, *dims: Any) -> Any:
    axes = len(_seen_shape(z))
    order = [_axis(place, axes) for place in _sizes_in(dims)]
    if len(order) != axes:
        return NotImplemented
    return _shaped(z, False, lambda d, more: d.permute(0, *[place + 1 for place in order]))


def _reshape(func: Any, z: Tensor, *shape: Any) -> Any:
    sizes = _sizes_in(shape)
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    return _shaped(z, False, lambda d, more: d.reshape(d.shape[0], *sizes))


def _getitem(func: Any, z: Tensor, index: Any) -> Any:
    index = index if isinstance(index, tuple) else (index,)
    for part in index:
        if isinstance(part, bool) or not (
            part is None or part is Ellipsis or isinstance(part, int | slice)
        ):
            return NotImplemented
    keeps_first = isinstance(index[0], slice) and index[0] == slice(None)
    return _shaped(z, keeps_first, lambda d, more: d[(slice(None),) * more + index])


def _spread(z: Tensor, sizes: tuple[Any, ...], repeats: bool) -> Any:
    """``z`` expanded to these sizes, or repeated so often."""
    seen, B = _seen_shape(z), memory_of(z).shape[0]
    more = len(sizes) - len(seen)
    if not sizes or more < 0:
        return NotImplemented
    if isinstance(z, SameRows) and not (repeats or more) and sizes[0] in (-1, B):
        return _like(z, memory_of(z).expand(B, *sizes[1:]))
    kind, d = Unbatched, rows_of(z)
    if sizes[0] == B and (more > 0 or seen[0] == 1):  # a row for each sample
        kind, sizes = SameRows, sizes[1:]
        d = d.reshape(B, *[1] * (more - 1), *seen) if more > 0 else d.select(1, 0)
    else:
        d = d.reshape(B, *[1] * more, *seen)
    return _of_kind(kind, d.repeat(1, *sizes) if repeats else d.expand(B, *sizes), _path_of(z))


def _expand(func: Any, z: Tensor, *shape: Any) -> Any:
    return _spread(z, _sizes_in(shape), repeats=False)


def _expand_as(func: Any, z: Tensor, other: Tensor) -> Any:
    like = _seen_shape(other) if isinstance(other, Unbatched) else other.shape
    return _expand(func, z, *like) if isinstance(z, Unbatched) else z.expand(like)


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


def _are_samples(others: Iterable[Tensor], B: int, axes: int) -> bool:
    return not any(
        [isinstance(x, nn.Parameter) or x.dim() != axes or x.shape[0] != B for x in others]
    )


def _pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that broadcasts and computes every element by itself."""
    sames = [x for x in args if isinstance(x, Unbatched)]
    others = [x for x in args if not (isinstance(x, Unbatched) or _is_scalar(x))]
    if not others:
        return _together(func, args, kwargs, sames)
    axes = max([x.dim() for x in others])
    if axes == 0 or not _are_samples(others, memory_of(sames[0]).shape[0], axes):
        return NotImplemented
    rows = [_aligned(x, axes) if isinstance(x, Unbatched) else x for x in args]
    return NotImplemented if any([row is None for row in rows]) else func(*rows, **kwargs)


def _together(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], sames: Sequence[Tensor]
) -> Any:
    path = _path_of(sames[0])
    axes = max([len(_seen_shape(x)) for x in sames])
    if any([isinstance(x, SameRows) and len(_seen_shape(x)) == axes for x in sames]):
        rows = [_aligned(x, axes) if isinstance(x, Unbatched) else x for x in args]
        if all([row is not None for row in rows]):
            return _of_kind(SameRows, func(*rows, **kwargs), path)
    found: list[Any] = []
    for x in args:
        if isinstance(x, Unbatched):
            d = rows_of(x)
            x = d.reshape(d.shape[0], *[1] * (axes + 1 - d.dim()), *d.shape[1:])
        found.append(x)
    return _of_kind(Unbatched, func(*found, **kwargs), path)


def _in_place(func: Any, x: Any, *rest: Any, **kwargs: Any) -> Any:
    """``x += z``"""
    if isinstance(x, Unbatched) or not isinstance(x, Tensor):
        return NotImplemented
    return _pointwise(func, x, *rest, **kwargs)


def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    sames = [x for x in tensors if isinstance(x, Unbatched)]
    others = [x for x in tensors if not isinstance(x, Unbatched)]
    if not sames or not isinstance(dim, int):
        return NotImplemented
    path, axes, B = _path_of(sames[0]), len(_seen_shape(sames[0])), memory_of(sames[0]).shape[0]
    place = _axis(dim, axes)
    if place < 1 or not all([isinstance(x, SameRows) for x in sames]):
        if others:
            return NotImplemented
        d = torch.cat([rows_of(x) for x in tensors], place + 1)
        return _of_kind(Unbatched, d, path)
    if not _are_samples(others, B, axes):
        return NotImplemented
    found = torch.cat([memory_of(x) if isinstance(x, Unbatched) else x for x in tensors], place)
    return found if others else _of_kind(SameRows, found, path)


#: Functions that are known to keep the samples apart, by name.
_SERVED: dict[str, Callable[..., Any]] = {
    "to": _to,
    "type_as": _to,
    "size": _size,
    "dim": lambda func, z: len(_seen_shape(z)),
    "is_floating_point": lambda func, z: memory_of(z).is_floating_point(),
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
    "repeat": lambda func, z, *repeats: _spread(z, _sizes_in(repeats), repeats=True),
    "where": _pointwise,
    "cat": _cat,
    "concat": _cat,
    "concatenate": _cat,
    **dict.fromkeys(
        (
            *("float", "double", "half", "bfloat16", "contiguous", "clone", "neg", "__neg__"),
            *("exp", "log", "sqrt", "rsqrt", "square", "abs", "sin", "cos", "clamp", "detach"),
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
