"""The short way of ``F.linear`` with a module's own weight, as routers call it in every layer.

The general way (:mod:`.functions`) makes some 190 calls; what may have changed since it served such
a call is asked here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping._compat import apply_of, transforms_are_active
from flash_clipping.capture.factor_source import FactorSource
from flash_clipping.capture.forward_call import in_backward
from flash_clipping.capture.proxies.parameter_proxy import ParameterProxy, circumstances
from flash_clipping.capture.proxies.proxy_ops import refuse_second
from flash_clipping.factors import Outer
from flash_clipping.ops.runtime.backend import is_autocasting
from flash_clipping.ops.runtime.tables import on_16_bytes
from flash_clipping.rules.registry import as_BTd, own


def note_linear(bare: ParameterProxy, leaves: list[Any], spec: Any) -> None:
    """The general way has served ``F.linear`` of these leaves, and samples: the next takes this."""
    tap, x = bare.tap, leaves[0]
    entered = tap.entered == circumstances() and torch.is_grad_enabled()
    if len(leaves) == 2 and spec == () and x.__class__ is Tensor and entered and not in_backward():
        tap.linear_when = tap.session.epoch, x.dtype, x.dim()


def linear_again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """``F.linear(x, weight)`` in a module that called it so before; ``None`` where it did not."""
    if kwargs or len(args) != 2:
        return None
    x, bare = args
    if bare.__class__ is not ParameterProxy or x.__class__ is not Tensor or not x.requires_grad:
        return None
    tap: FactorSource = bare.tap
    session = tap.session
    call = session.current_forward
    if (
        call is None
        or call.reads is not None
        or session.probing is not None
        or tap.linear_when != (session.epoch, x.dtype, x.dim())
        or session.layouts
        or bare.origin is None
        or bare.value is not bare.origin.leaf
        or bare.value.dtype != x.dtype
        or not bare.is_kept
        or is_autocasting()
        or circumstances() != tap.entered
        or transforms_are_active()
        or in_backward()
        or not session.knows_samples(call, tap.path)
    ):
        return None
    (weight,) = bare.leaves.values()
    call.used.append([weight])
    output: Tensor = _apply_linear(tap, call, x, weight)
    return output


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
