"""What is the same for all samples, inside compiled regions.

An embedding of positions reads ids that do not derive from the batch, ``[1, T]``, and a module adds
its own parameter to what it is given. Neither has a row for each sample, so the gradient that
arrives there is a sum over samples. Here such a value has one more axis, ``[B, *shape]``: all rows
are alike, and the gradient of row ``b`` is that of sample ``b``. The model does not see it: it
gets a :class:`Unbatched`, a tensor subclass that says to be of ``shape``.

A function of it runs as it would for each sample if that were the only one (``torch.vmap``): row
``b``, and of what has samples, sample ``b`` alone. Where one meets samples, ``x + z``, what comes
out are samples. That this is the function of all samples shows by the shapes, and, when the region
is run uncompiled to learn what its layers leave, by the numbers. Where it does not, the layers have
no wires; found later, it is an error. Dynamo traces all of it away: what is left are views and the
model's own operators.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping._compat import (
    constant_in_traces,
    is_traced_once,
    plain_functions,
    pytree,
    tracing_context,
    transforms_are_active,
)
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.proxies import ParameterProxy
from flash_clipping.capture.proxies.parameter_proxy import name_of
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


def same_for_all(x_B: Tensor, path: str, kind: type[Unbatched] = Unbatched) -> Tensor:
    """``[B, *shape]``, of which the model sees ``shape``. It comes from the module at ``path``."""
    found = x_B.as_subclass(kind)
    if not is_dynamo_compiling():  # Dynamo has no place for it
        found.path = path  # type: ignore[attr-defined]
    return found


def _path_of(z: Any) -> str:
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


def _plain(x: Any) -> Any:
    """What the model would have had without this."""
    if isinstance(x, SameRows):
        return memory_of(x)
    return torch.select(memory_of(x), 0, 0) if isinstance(x, Unbatched) else x


class UnsupportedConstant(FlashClippingError):
    """What is the same for all samples is used in a way that is not supported in a region.

    Attributes:
        use: what was done with it.
    """

    def __init__(self, path: str, use: str):
        self.use = use
        super().__init__(
            f"FC714 {path or 'a compiled layer'}: it computes what is the same for all samples "
            f"(from ids of positions, or from parameters alone), and {use}. Call the layer "
            "outside of what is compiled, or expand what it reads: x.expand(batch_size, ...)."
        )


def refuse_escaped(output: Any) -> None:
    """What a region returns leaves it: outside, a row for each sample is nothing that is known."""
    for x in tensors_in(output):
        if isinstance(x, Unbatched):
            path = _path_of(x)
            raise UnsupportedConstant(path, f"the region returns what {path or 'it'} computes")


def refuse_constants(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse the call of a layer that takes samples only."""
    if any(isinstance(x, Unbatched) for x in pytree.tree_leaves((args, kwargs))):
        found = f"{path} is called with what is computed from constants alone"
        raise UnsupportedConstant(path, found)


# -- functions of it -------------------------------------------------------------------------------

#: What is asked of a tensor, and is no tensor.
_ASKED = {"size", "dim", "is_floating_point", "__len__"} | {
    f"__get__{name}"
    for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "layout")
}
#: Functions of which other tensors give the dtype and the device alone.
_CASTS = {"to", "type_as"}
#: Functions of sizes, the first of which may be the number of samples.
_SIZED = {"expand", "repeat", "view", "reshape"}
#: Functions that change samples in place, and what they do.
_IN_PLACE: dict[str, Any] = {
    **dict.fromkeys(("add_", "__iadd__"), torch.add),
    **dict.fromkeys(("sub_", "__isub__"), torch.sub),
    **dict.fromkeys(("mul_", "__imul__"), torch.mul),
}
#: Methods, written in Python, that Dynamo does not trace where a subclass has them; and functions
#: that PyTorch does not take apart, sample by sample, for sizes that are symbols.
_UNTRACED: tuple[Any, ...] = (
    *(Tensor.split, Tensor.unflatten, Tensor.norm),
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__),
    *(F.linear, F.interpolate, F.scaled_dot_product_attention),
)


@constant_in_traces
def _apart() -> bool:
    """Whether what is traced now keeps the samples where they are: no transform of torch.func, and
    no body of an operator that is run several times."""
    return not transforms_are_active() and (tracing_context() is None or is_traced_once())


@constant_in_traces
def _name_of(func: Callable[..., Any]) -> str:
    return name_of(func)


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name = _name_of(func)
    if name in _ASKED:
        z = _plain(args[0])
        return getattr(z, name[7:]) if name.startswith("__get__") else func(z, *args[1:])
    result = None
    if _apart() and is_dynamo_compiling():
        result = _of_each(func, name, args, kwargs)
    elif _apart() and func not in _UNTRACED:
        with suppress(RuntimeError, TypeError, ValueError, IndexError):
            result = _of_each(func, name, args, kwargs)
    if result is not None:
        return result
    found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Unbatched)]
    raise UnsupportedConstant(_path_of(found[0]) if found else "", f"{name} is called with it")


def _of_each(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The function as each sample has it if it is the only one; None where that may be something
    else than the function of all samples."""
    z: Any = args[0] if args else None
    seen, named = pytree.tree_map(_plain, (args, kwargs))
    if name in _CASTS:
        if not isinstance(z, Unbatched):
            return func(z, *seen[1:], **named)
        same = SameRows if isinstance(z, SameRows) else Unbatched  # type() is not traced
        return same_for_all(func(memory_of(z), *seen[1:], **named), _path_of(z), same)
    if name == "expand_as" and isinstance(z, Unbatched):
        return _of_each(torch.Tensor.expand, "expand", (z, *seen[1].shape), {})
    changes = name.startswith("__set") or (name.endswith("_") and not name.startswith("__"))
    changes = changes or name in _IN_PLACE
    if changes and (name not in _IN_PLACE or isinstance(z, Unbatched)):
        return None
    if kwargs.get("out") is not None:
        return None
    func = _IN_PLACE.get(name, func)
    whole = func(*seen, **named)
    outputs = whole if isinstance(whole, tuple | list) else (whole,)
    if not all([isinstance(output, Tensor) for output in outputs]):
        return None
    leaves = pytree.tree_leaves((args, kwargs))
    first = next(x for x in leaves if isinstance(x, Unbatched))
    B, axes = memory_of(first).shape[0], outputs[0].dim()
    if name in _SIZED:
        args = (z, *_sizes_alone(first, name, args[1:], B))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    rows: list[Tensor] = []
    in_dims: list[int | None] = []
    has_samples = False
    for x in leaves:
        if isinstance(x, Unbatched):
            rows.append(memory_of(x).unsqueeze(1) if isinstance(x, SameRows) else memory_of(x))
            in_dims.append(0)
        elif isinstance(x, Tensor):
            is_frozen = isinstance(x, nn.Parameter) and not x.requires_grad
            has_rows = x.dim() == axes and axes > 0 and x.shape[0] == B and not is_frozen
            if isinstance(x, nn.Parameter | ParameterProxy) and not is_frozen:
                return None  # of another module
            is_one = (x.dim() == 0 or x.shape[0] == 1) and not x.requires_grad
            if not (has_rows or is_frozen or is_one):
                return None  # it may be of samples after all, with other axes
            has_samples = has_samples or has_rows
            rows.append(x.unsqueeze(1) if has_rows else x)
            in_dims.append(0 if has_rows else None)

    def of_one(*tensors: Tensor) -> Any:
        left = list(tensors)
        given = [left.pop(0) if isinstance(x, Tensor) else x for x in leaves]
        own, named = pytree.tree_unflatten(given, spec)
        return func(*own, **named)

    each = torch.func.vmap(of_one, in_dims=tuple(in_dims))(*rows)
    each = each if isinstance(each, tuple | list) else (each,)
    results: list[Tensor] = []
    for alone, whole_one in zip(each, outputs, strict=True):
        kind = _kind_of(alone, whole_one, has_samples)
        if kind is None:
            return None
        result = alone if kind is Unbatched else alone.squeeze(1)
        results.append(result if has_samples else same_for_all(result, _path_of(first), kind))
    if changes:
        return z.copy_(results[0])
    return tuple(results) if isinstance(whole, tuple | list) else results[0]


def _sizes_alone(z: Tensor, name: str, sizes: tuple[Any, ...], B: int) -> tuple[Any, ...]:
    """The sizes that a function is called with, for a sample alone, of which there is one."""
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    shape = _plain(z).shape
    has_rows = name in ("expand", "repeat") and (len(sizes) > len(shape) or shape[0] == 1)
    if sizes[0] == B and (has_rows or isinstance(z, SameRows)):
        return (1, *sizes[1:])
    return sizes


def _kind_of(each: Tensor, whole: Tensor, has_samples: bool) -> type[Unbatched] | None:
    """What a result is, by what each sample alone has of it, and by what the model sees."""
    B = each.shape[0]
    if each.dim() > 1 and each.shape[1] == 1 and (B, *each.shape[2:]) == tuple(whole.shape):
        return SameRows if is_dynamo_compiling() or _agree(each.squeeze(1), whole) else None
    if each.shape[1:] != whole.shape or has_samples:
        return None
    return Unbatched if is_dynamo_compiling() or _agree(each, whole.unsqueeze(0)) else None


def _agree(each: Tensor, whole: Tensor) -> bool:
    """Whether a function of one sample is that of all, in these numbers at least."""
    if not whole.is_floating_point():
        return bool((each == whole).all())
    near = torch.finfo(whole.dtype).eps ** 0.5
    scale = float(whole.detach().nan_to_num(0, 0, 0).abs().amax()) if whole.numel() else 0.0
    return torch.allclose(each, whole.expand_as(each), near, near * scale, equal_nan=True)
