"""Short ways of what models call in every layer: ``F.linear`` with a module's own weight (routers),
and attention with a mask that comes from parameters (biases by relative position).

The general way (:mod:`.functions`) makes some 190 calls; what may have changed since it served such
a call is asked here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping._compat import apply_of, transforms_are_active
from flash_clipping.capture.factor_source import FactorSource
from flash_clipping.capture.forward_call import ForwardCall, in_backward
from flash_clipping.capture.proxies.parameter_proxy import ParameterProxy, circumstances
from flash_clipping.capture.proxies.proxy_ops import of_samples, refuse_second
from flash_clipping.factors import Outer
from flash_clipping.ops.runtime.backend import is_autocasting
from flash_clipping.ops.runtime.tables import on_16_bytes
from flash_clipping.rules.registry import as_BTd, own


def note_served(func: Callable[..., Any], bare: ParameterProxy, x: Tensor) -> None:
    """The general way has served this function of a stand-in, and samples: the next may take the
    short one."""
    tap = bare.tap
    entered = tap.entered in (None, circumstances()) and torch.is_grad_enabled()
    if entered and not in_backward():
        tap.served[func] = tap.session.epoch, x.dtype, x.dim()


def _known(func: Any, bare: ParameterProxy, x: Tensor, reads: int = 1) -> ForwardCall | None:
    """The running call of the root, if what this function reads besides a stand-in, ``x`` first, is
    known to be samples, and nothing has changed since it was so before; it counts as read then."""
    tap = bare.tap
    session = tap.session
    call = session.current_forward
    if (
        call is None
        or call.reads is not None
        or session.probing is not None
        or tap.served.get(func) != (session.epoch, x.dtype, x.dim())
        or session.layouts
        or tap.entered not in (None, circumstances())
        or not torch.is_grad_enabled()
        or transforms_are_active()
        or in_backward()
        or not session.knows_samples(call, tap.path, reads)
    ):
        return None
    return call


def _linear(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """``F.linear(x, weight)`` in a module that called it so before; ``None`` where it did not."""
    if kwargs or len(args) != 2:
        return None
    x, bare = args
    if bare.__class__ is not ParameterProxy or x.__class__ is not Tensor or not x.requires_grad:
        return None
    if (
        bare.origin is None
        or bare.value is not bare.origin.leaf
        or bare.value.dtype != x.dtype
        or not bare.is_kept
        or is_autocasting()
        or bare.tap.entered is None
    ):
        return None
    call = _known(F.linear, bare, x)
    if call is None:
        return None
    (weight,) = bare.leaves.values()
    call.used.append([weight])
    output: Tensor = _apply_linear(bare.tap, call, x, weight)
    return output


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Attention of samples whose mask is the same for all of them, likewise."""
    mask = kwargs.get("attn_mask")
    if mask.__class__ is not ParameterProxy or len(args) != 3:
        return None
    for x in args:
        if x.__class__ is not Tensor or not x.requires_grad:
            return None
    query, rank = args[0], args[0].dim()
    if mask.row is not None or not (mask.requires_grad and mask.value.requires_grad):
        return None
    if mask.dim() == rank and len(mask.value) != 1:
        return None
    if _known(F.scaled_dot_product_attention, mask, query, reads=3) is None:
        return None
    whole = of_samples(mask, len(query), rank)
    output: Tensor = F.scaled_dot_product_attention(*args, **{**kwargs, "attn_mask": whole})
    return output


#: By the function: its result, or ``None`` where it has to take the general way.
SHORT_WAYS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Tensor | None]] = {
    F.linear: _linear,
    F.scaled_dot_product_attention: _attention,
}


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tap: FactorSource, call: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tap, ctx.samples, ctx.weight = tap, call.batch_size, weight
        return own(F.linear(x, weight))

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        refuse_second(ctx.tap)
        factor = Outer(as_BTd(x), on_16_bytes(as_BTd(G)))
        grad = G @ weight if ctx.needs_input_grad[2] else None
        if ctx.tap.session.enabled:
            ctx.tap.record([ctx.weight], [factor], False, samples=ctx.samples)
            return None, None, grad, None
        return None, None, grad, factor.clipped_sum(None, ctx.tap.session.backend)


_apply_linear = apply_of(_LinearFunction)  # transforms of torch.func were refused before
