"""What a layer with a rule was called with, and which of it holds a row for each sample."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

from flash_clipping._compat import memory_id, pytree
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.proxies import ParameterProxy, along
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError
from flash_clipping.rules.registry import Rule, UnsupportedLayer

_signature_of = functools.lru_cache(maxsize=1024)(inspect.signature)


class ReadsNoSamples(Exception):
    """All that a layer reads is the same for all samples."""


def positional(
    layer: nn.Module, path: str, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """All that a layer was called with, in the order in which its rule takes it; refused, where the
    rule does not take some of it, or could not give its gradient."""
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
        f"FC163 {path}: it was called with {found}, which its rule {type(rule).__name__} does not "
        "take; it would be lost. Call the layer without, or write a rule whose forward takes it "
        f"(flash_clipping.register_rule).{ONE_BY_ONE}"
    )


def samples_in(
    path: str,
    session: ClippingSession,
    layer: nn.Module,
    rule: Rule,
    call: ForwardCall,
    axis: int,
    args: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """A layer's inputs with a row for each sample; ``None`` where they are all constants."""
    call.begin_call(path)
    rows = rule.rows(layer, *args)
    if rows is not None:  # the rule knows which rows belong together
        found, standing_for, sets_batch = rows
        ids = args[0]
        if (
            sets_batch
            and memory_id(standing_for.untyped_storage()) in call.input_storages
            and ids.dim() == 1
        ):
            if call.batch_sizes[:1] == (len(ids),):
                # The model was called with the ids of all bags end to end: these are the samples.
                call.batch_sizes = (found,)
                if call.reads is not None:
                    call.reads.offsets = standing_for
            elif call.reads is not None and found == call.batch_size:
                call.reads.bags.append((standing_for, ids))
        tensors = [x for x in args if isinstance(x, Tensor)]
        samples = session.is_batched(
            path,
            standing_for,
            0,
            sure=call.batch_size is None
            or any(x.requires_grad and not isinstance(x, ParameterProxy) for x in tensors),
            rows=found,
            also=tensors,
        )
        return args if samples else None
    inputs = [x for x in args if isinstance(x, Tensor) and x.dim() > axis]
    of_rule = type(rule).batch_axis is not Rule.batch_axis  # the rule's own axis
    if of_rule and axis and call.batch_size:
        # Along that axis: each sample meets a place of its own there.
        placed = {
            id(x): along(x, call.batch_size, axis)
            for x in inputs
            if isinstance(x, ParameterProxy) and x.shape[axis] == call.batch_size
        }
        args = tuple(placed.get(id(x), x) for x in args)
        inputs = [x for x in args if isinstance(x, Tensor) and x.dim() > axis]
    kinds: dict[int, bool] = {}
    for x in inputs:
        if id(x) not in kinds:
            sure = x.requires_grad or call.batch_size is None
            kinds[id(x)] = not isinstance(x, ParameterProxy) and session.is_batched(
                path, x, axis, sure=sure
            )
    if inputs and not any(kinds.values()):
        return None
    if not all(kinds.values()):
        constant = next(x for x in inputs if not kinds[id(x)])
        raise FlashClippingError(
            f"FC221 {path}: one of its inputs, of shape {tuple(constant.shape)}, is the same for "
            "all samples, and another one is not. Expand it over the batch, x.expand(batch_size, "
            "...)."
        )
    return args


def rows_by_sample(
    session: ClippingSession, args: tuple[Any, ...], axis: int, call: ForwardCall | None
) -> tuple[Any, ...]:
    """Inputs ``[B·T, ...]`` as ``[B, T, ...]``, for a rule that takes them so."""
    samples = session.samples() if call is None else call.batch_size
    rows = args[0].shape[0]
    if axis or not samples or rows % samples:
        raise UnsupportedLayer(
            f"FC201 found {rows} rows for a batch of {samples} along axis {axis}; expected as many "
            "rows for every sample, which lie together: give the model [batch, ...] inputs, all of "
            "one length."
        )
    return tuple(x.unflatten(0, (samples, -1)) if isinstance(x, Tensor) else x for x in args)


def refuse_input(path: str, x: Any, param: nn.Parameter) -> NoReturn:
    """Say why no rule can take this input of a layer whose parameters are where ``param`` is."""
    if not isinstance(x, Tensor):
        raise FlashClippingError(
            f"FC204 {path}: expected a tensor as first input, found {type(x).__name__}.{ONE_BY_ONE}"
        )
    if x.device != param.device:
        advice = f'Move the batch to the model:\n    x = x.to("{param.device}")'
        if param.is_meta:
            advice = (
                "Load the model again, and wrap it then:\n"
                f'    model.to_empty(device="{x.device}"); model.load_state_dict(state)'
            )
        elif param.device.type == "cpu" and not x.is_meta:
            advice = f'Move the model, before the optimizer is made:\n    model.to("{x.device}")'
        raise FlashClippingError(
            f"FC205 {path}: its parameters are on {param.device}, but its input is on {x.device}. "
            f"{advice}"
        )
    raise FlashClippingError(
        f"FC203 {path}: found an input of shape {tuple(x.shape)}, which has no batch axis; "
        f"expected [batch, ...]. Add the axis with unsqueeze(0).{ONE_BY_ONE}"
    )
