"""Functions that get a stand-in: of parameters alone, or also of tensors that carry samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping._compat import (
    plain_functions,
    pytree,
    saved_tensors_hooks_now,
    transforms_are_active,
)
from flash_clipping.capture.borrowed import refuse_until_lent
from flash_clipping.capture.factor_source import FactorSource
from flash_clipping.capture.proof.reads import REPEATED, Read
from flash_clipping.capture.proxies.parameter_proxy import (
    ParameterProxy,
    TableRows,
    UnsupportedUse,
    called,
    flattened,
    is_plain,
    name_of,
    origin_of,
    unflattened,
)
from flash_clipping.capture.proxies.proxy_ops import (
    expanded,
    mixed,
    of_samples,
)
from flash_clipping.capture.row_layouts import Layout
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError

#: Functions that only look at the other tensor's shape, dtype or device.
_METADATA_ONLY = {"type_as", "expand_as", "view_as", "reshape_as", "to", "broadcast_to"}
_EXPANDING = {"expand", "expand_as", "repeat", "broadcast_to", "tile"}
_DETACHING = {"detach", "__get__data"}
#: Functions of one tensor that return none.
_ASKING = {"__get__dtype", "__get__shape", "__get__device", "__get__ndim", "dim", "size"}
_ADDITION = {"add", "add_"}
#: Functions of tensors and numbers, element by element.
_BY_ELEMENT = _ADDITION | {"sub", "sub_", "subtract", "rsub", "__rsub__", "mul", "mul_", "multiply"}
_BY_ELEMENT |= {"div", "div_", "true_divide", "__rdiv__", "where", "masked_fill", "addcmul", "lerp"}
_LOOKUP = inspect.signature(F.embedding)
_ELEMENT = torch.zeros(())
_as_they_are = partial(torch.autograd.graph.saved_tensors_hooks, lambda x: x, lambda x: x)


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one torch function that got at least one bare parameter."""
    name = name_of(func)
    if name in _ASKING and isinstance(args[0], ParameterProxy):
        return func(args[0].value, *args[1:], **kwargs)
    leaves, spec = flattened(args, kwargs)
    bares = [leaf for leaf in leaves if isinstance(leaf, ParameterProxy)]
    tap = bares[0].tap
    others = [leaf for leaf in leaves if is_plain(leaf)]
    if name in _DETACHING:
        return bares[0].value.detach()
    if transforms_are_active():
        raise UnsupportedUse(tap, f"{name} inside a transform of torch.func (vmap, grad, jvp, ...)")
    if any([bare.requires_grad and not bare.value.requires_grad for bare in bares]):
        found = "a re-entrant checkpoint, or another torch.autograd.Function, returned what is "
        raise UnsupportedUse(tap, f"{found}computed from it alone")
    if torch.is_grad_enabled() and not any([bare.requires_grad for bare in bares]):
        return called(func, leaves, spec)  # all were computed with gradients off
    if name == "backward":
        raise UnsupportedUse(
            tap,
            "backward() of something that no tensor with the batch as its first axis took part in",
        )
    if name == "__setitem__" and _is_masked_write(*args):
        x, mask, value = args
        mask = mask.view(*mask.shape, *[1] * (x.dim() - mask.dim()))
        x.masked_fill_(mask, 0).add_(_run(torch.mul, (mask.to(x.dtype), value), {}))
        return None
    writes = kwargs.get("out") is not None
    may_write = not torch.is_grad_enabled() and is_plain(kwargs.get("out"))
    if name.startswith("__set") or (writes and not may_write):
        raise UnsupportedUse(tap, f"{name} writes into a tensor")
    in_place = name.endswith("_") and not name.startswith("__")
    equation = "".join([leaf for leaf in leaves if isinstance(leaf, str)][:1])  # einsum's
    layout, use, count = _laid_out(tap, f"{name} {equation}".strip(), bares, others)
    axis = _axis_of(name, leaves, bares[0]) if layout is None else layout.axis
    given = others if layout is None else [layout.front(others[0], count)]
    batched = []
    if name not in _METADATA_ONLY:
        batched = _carry_samples(tap, given, axis if layout is None else 0)
    fills = name == "masked_fill" and isinstance(leaves[-1], ParameterProxy)  # has to be a number
    is_by_element = name in _BY_ELEMENT and not fills
    if any(batched):
        if writes:
            raise UnsupportedUse(tap, f"{name} writes into a tensor")
        _refuse_mixing(tap, name, args, kwargs)
        _refuse_others(tap, name, others)
        reads = _last_reads(tap, len(batched))
        result = None
        if is_by_element:
            carriers = [x for x, carries in zip(others, batched, strict=True) if carries]
            result = _by_element(func, leaves, spec, carriers, axis, count)
        if result is None:
            if in_place:
                raise UnsupportedUse(tap, f"{name} changes a tensor in place")
            if axis and layout is None:
                raise UnsupportedUse(tap, f"{name} adds axes to the batch")
            result = mixed(func, leaves, spec, batched, layout, count, use)
        if use and (call := tap.session.current_forward) is not None and call.reads is not None:
            call.reads.note_use(use, reads, result)
        return result
    if in_place and not isinstance(leaves[0], ParameterProxy):
        # Only its result would be known to come from parameters, not the tensor itself.
        raise UnsupportedUse(tap, f"{name} writes it into a tensor in place")
    reads_grad = any(x.requires_grad for x in others)
    if name not in _METADATA_ONLY and torch.is_grad_enabled() and reads_grad:
        _refuse_others(tap, name, others)
        raise UnsupportedUse(tap, f"{name} puts it together with another module's parameter")
    # What functions of parameters alone save for their backward stays, also under checkpointing:
    # they go backward alone, for each sample, in the midst of a backward. Each of that
    # would run the whole checkpoint again, and under vmap, where dropout fails.
    with _as_they_are() if saved_tensors_hooks_now() else nullcontext():
        result = called(func, leaves, spec)
        if writes:
            return result  # what it wrote into, with gradients off
        if name in _METADATA_ONLY and is_plain(leaves[0]):
            return result  # only the parameter's shape, dtype or device went into it
        if name in _EXPANDING and (samples := _over_samples(leaves[0], name, result)) is not None:
            return samples
        made = _stand_ins(func, name, leaves, spec, result, bool(kwargs), in_place)
        if in_place and isinstance(made, ParameterProxy):  # which may be dropped
            if made.leaves.keys() != leaves[0].leaves.keys() and made.value._is_view():
                raise UnsupportedUse(tap, f"{name} writes it into a view in place")
            leaves[0].leaves = made.leaves
        if is_by_element and not in_place and isinstance(made, ParameterProxy):
            of_one = _of_one_row(leaves, bares[0])
            if of_one is not None:
                row = called(func, of_one, spec)
                made.one = _stand_ins(func, name, of_one, spec, row, bool(kwargs))
    return made


def _stand_ins(
    func: Callable[..., Any],
    name: str,
    leaves: list[Any],
    spec: Any,
    result: Any,
    named: bool,
    in_place: bool = False,
) -> Any:
    """The result of a function of parameters and constants, with stand-ins for its tensors.

    ``named``: arguments were given by name, in whatever order.
    """
    bares = [leaf for leaf in leaves if isinstance(leaf, ParameterProxy)]
    tap = bares[0].tap
    origin = {leaf: param for bare in bares for leaf, param in bare.leaves.items()}
    source = None
    if len(bares) == 1 and isinstance(result, Tensor):
        if name == "embedding" and (rows := _looked_up(leaves, spec, bares[0], result)) is not None:
            return ParameterProxy.of_leaf(result, rows, tap)
        if (known := bares[0].kept_origin) is not None and not in_place:
            source = origin_of(name, leaves, named, bares[0].value, known, result)

    def derived(value: Tensor) -> Tensor:
        if not (value.is_floating_point() or value.is_complex()):
            return value
        if not value.requires_grad and torch.is_grad_enabled():
            return value
        return ParameterProxy.wrap(value, origin, tap, source)

    return pytree.tree_map_only(Tensor, derived, result)


ParameterProxy.run = staticmethod(_run)


def _refuse_others(tap: FactorSource, name: str, others: list[Tensor]) -> None:
    """Raise ``UnsupportedUse`` where a function is called with another module's parameter, beside a
    stand-in; ``UsesOthers`` in a look that may let it have a stand-in as well."""
    refuse_until_lent(tap.session, others)
    if any([isinstance(x, nn.Parameter) and x.requires_grad for x in others]):
        raise UnsupportedUse(tap, f"{name} puts it together with another module's parameter")


def _is_masked_write(x: Any, index: Any, value: Any) -> bool:
    """Whether a tensor gets one value, made of parameters, in some of its rows (Wav2Vec2 masks
    frames): ``x[mask] = value``."""
    return (
        is_plain(x)
        and is_plain(index)
        and isinstance(value, ParameterProxy)
        and index.dtype == torch.bool
        and index.shape == x.shape[: index.dim()]
        and value.dim() <= x.dim() - index.dim()
        and value.dtype == x.dtype
    )


def _of_one_row(leaves: list[Any], bare: ParameterProxy) -> list[Any] | None:
    """Arguments of a function by element that puts constants which are the same for every sample, a
    row for each, together with one stand-in that has a single row: with one row of the constants.

    ``None``: it is not so.
    """
    call, tensors = bare.tap.session.current_forward, [x for x in leaves if isinstance(x, Tensor)]
    rank = max(x.dim() for x in tensors)
    many = [x for x in tensors if x.dim() == rank and len(x) != 1] if rank else []
    alone = sum(isinstance(x, ParameterProxy) for x in tensors) == 1
    if not (alone and many and call is not None and torch.is_grad_enabled()):
        return None
    if any(x is bare or len(x) != call.batch_size or x.stride(0) for x in many):
        return None
    return [x[:1] if any(x is y for y in many) else x for x in leaves]


def _by_element(
    func: Callable[..., Any],
    leaves: list[Any],
    spec: Any,
    samples: list[Tensor],
    axis: int,
    count: int,
) -> Tensor | None:
    """A function by element of samples, which lie along this axis, and stand-ins: every sample gets
    the stand-ins for itself, as they are broadcast, and the rest is autograd's.

    Args:
        samples: the tensors among its arguments that carry them.
        count: how many there are; 0: by the module's rows.

    Returns:
        ``None`` where a stand-in is not the same for all samples.
    """
    shape = _broadcast([x.shape for x in leaves if isinstance(x, Tensor)])
    rank = len(shape)
    if rank <= axis or not any(x.dim() == rank and x.shape[axis] == shape[axis] for x in samples):
        return None
    given = []
    for x in leaves:
        if isinstance(x, ParameterProxy):
            if axis == 0 and x.dim() == rank and x.shape[:1] == shape[:1]:
                x = x.of_one_row
            if x.dim() >= rank - axis and x.shape[axis - rank] != 1:
                return None
            x = of_samples(x, shape, axis, count) if x.value.requires_grad else x.value
        given.append(x)
    args, kwargs = unflattened(given, spec)
    result: Tensor = func(*args, **kwargs)
    return result


def _broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that tensors of these are broadcast to: in Python, ``torch.broadcast_shapes`` takes
    as long as all else here. Where they do not fit, the function raises its own error."""
    found = [1] * max(map(len, shapes))
    for shape in shapes:
        for n, size in enumerate(shape, len(found) - len(shape)):
            if size != 1:
                found[n] = size
    return tuple(found)


def _last_reads(tap: FactorSource, count: int) -> list[Read]:
    """The last reads of the module, so many."""
    call = tap.session.current_forward
    of_call, end = (0, 0) if call is None else call.turns.get(tap.path, (0, 0))
    return [(tap.path, of_call, end - 1 - n) for n in range(count)]


def _over_samples(bare: Any, name: str, result: Tensor) -> Tensor | None:
    """A stand-in that was repeated along the batch axis as often as there are samples: an ordinary
    tensor from here on, in which every sample has a repetition, or several that lie together.

    That the repetitions are the samples' is shown as of anything that a layer reads. ``None`` where
    they are not: a function of parameters alone.
    """
    tap, session = bare.tap, bare.tap.session
    call, axis = session.current_forward, session.options.batch_axis
    new = result.dim() - bare.dim()
    if call is None or not call.batch_size or tap.reads_constants or result.dim() <= axis:
        return None
    length = 1 if axis < new else bare.shape[axis - new]
    if length == 0 or result.shape[axis] == 0 or session.rows.positions is not None:
        return None
    times = result.shape[axis] // length
    # By an element of its own: the memory of a parameter is never samples.
    like = _ELEMENT.expand(times)
    are_samples = session.is_batched(tap.path + REPEATED, like, 0, sure=False)
    if not are_samples or times % call.batch_size:
        return None
    if name in ("repeat", "tile") and not result.is_contiguous():
        result = result.contiguous()
    return expanded(bare, result, axis, call.batch_size)


def _refuse_mixing(tap: FactorSource, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse functions of samples and parameters whose result for one sample needs the others."""
    trains = name == "batch_norm" and (kwargs.get("training") or any(x is True for x in args[5:6]))
    by_count = "embedding" in name and kwargs.get("scale_grad_by_freq")
    if trains or by_count:
        instead = "group_norm or layer_norm"
        if by_count:
            name, instead = f"{name}(scale_grad_by_freq=True)", "scale_grad_by_freq=False"
        raise FlashClippingError(
            f"FC101 {tap.path}: calls {name}, in which one sample's result depends on the others, "
            f"so no clipping can bound what a sample adds. Use {instead}.{ONE_BY_ONE}"
        )


def _looked_up(
    leaves: list[Any], spec: Any, bare: ParameterProxy, result: Tensor
) -> TableRows | None:
    """Which rows of a table ``F.embedding`` has looked up, if it is a parameter as it is."""
    args, kwargs = unflattened(leaves, spec)
    given = _LOOKUP.bind(*args, **kwargs).arguments
    table = bare.leaves.get(bare.value)
    changes = given.get("scale_grad_by_freq") or given.get("max_norm") is not None
    if changes or given["weight"] is not bare or not isinstance(table, nn.Parameter):
        return None
    if not result.requires_grad:
        return None  # computed with gradients off
    padding_idx = given.get("padding_idx")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(table)
    return TableRows(given["input"], table, padding_idx)


def _axis_of(name: str, leaves: list[Any], bare: ParameterProxy) -> int:
    """The axis that holds the samples of what meets a bare parameter.

    That is the first, but where rows of a table are added to a batch that has positions first.
    """
    from_table = any(isinstance(leaf, TableRows) for leaf in bare.leaves.values())
    if name not in _ADDITION or len(leaves) != 2 or not from_table:
        return 0
    plain = next((leaf for leaf in leaves if is_plain(leaf)), None)
    if plain is None or plain.dim() < 3 or plain.shape[-1] != bare.shape[-1]:
        return 0
    return bare.tap.session.options.batch_axis


def _laid_out(
    tap: FactorSource, name: str, bares: list[ParameterProxy], tensors: list[Tensor]
) -> tuple[Layout | None, str, int]:
    """Where samples lie in the one tensor that meets bare parameters, if not along its first axis;
    what that goes by, where any layout is known or looked for; and how many samples there are."""
    session = tap.session
    call = session.current_forward
    if len(tensors) != 1 or session.options.batch_axis or session.rows.positions is not None:
        return None, "", 0
    if not session.known.layouts and (call is None or call.reads is None):
        return None, "", 0
    wanted = {id(param) for bare in bares for param in bare.params}
    # Of a parameter that is tied, under one name: the outermost module's.
    names = {
        id(param): f"{tap.path}: {its_name}"
        for _, its_name, param in reversed(session.calls.stood_in)
        if id(param) in wanted
    }
    # Of what a module has returned, the module's.
    use = f"{', '.join(sorted(names.values())) or tap.path} in {name}"
    count = (session.samples() if call is None else call.batch_size) or 0
    layout = session.known.layouts.get(use)
    if layout is None or not count or tap.reads_constants or tensors[0].dim() == 0:
        return None, use, count
    layout.check(f"{tap.path}: {use}", tensors[0], count)
    return layout, use, count


def _carry_samples(tap: FactorSource, tensors: list[Tensor], axis: int) -> list[bool]:
    """For tensors that meet bare parameters in one operation: which belong to the batch, as was
    shown."""
    # Those that came out of a tapped layer that read samples. Beside one, a mask that was computed
    # from it needs no proof.
    sure = [x.requires_grad and not (x.is_leaf and isinstance(x, nn.Parameter)) for x in tensors]
    certain = any(sure)

    def belongs(x: Tensor, is_sure: bool) -> bool:
        if tap.reads_constants or isinstance(x, nn.Parameter):
            return False
        if x.dim() == 0:
            return is_sure
        beside = certain and not is_sure
        return tap.session.is_batched(tap.path, x, axis, sure=is_sure, beside=beside)

    return [belongs(x, is_sure) for x, is_sure in zip(tensors, sure, strict=True)]


def along(x: ParameterProxy, batch_size: int, axis: int) -> Tensor:
    """A stand-in that is handed to a layer in which each sample meets a place of its own along this
    axis."""
    with plain_functions():
        if x.is_kept and x.value.stride(axis) == 0:  # all of these places are one
            one = ParameterProxy.wrap(x.value.narrow(axis, 0, 1), x.leaves, x.tap)
            return expanded(one, x.value, axis, batch_size)
        shape = [1] * x.dim()
        shape[axis] = batch_size
        like = torch.zeros((), dtype=x.dtype, device=x.device).expand(shape)
        leaves, spec = flattened((like, x), {})
        return mixed(torch.add, leaves, spec, [True], Layout(axis), batch_size)
