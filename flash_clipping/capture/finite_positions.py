"""Where units are parts of rows: a document that is not finite does not leave a layer.

Attention between layers multiplies what is masked by 0, and 0 · inf is NaN: one document would
take all others of its row with it, and the sum would change by more than what one may add. So
positions that are not finite become zeros wherever a layer hands them on: its outputs in forward,
the gradients of its inputs in backward. Nothing else has to be looked at. A layer works position by
position, so what it reads or holds of one document concerns that document alone; only what happens
between layers may carry it elsewhere.

The documents of such positions are noted (:meth:`Units.lost_on`), and get coefficient 0 whatever
their norms are. What a layer computes of its zeros in backward need therefore not be marked.

``R`` rows of the batch, ``T`` positions of each, ``N = R·T``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_clipping._compat import apply_of, is_alias_of
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tapped_layer import TappedLayer, backward_of
from flash_clipping.ops.rows import finite_rows


def zero_nonfinite(output: Tensor, session: ClippingSession) -> Tensor:
    """``output`` with zeros at positions that are not finite."""
    if not output.is_floating_point():
        return output
    found: Tensor = _FinitePositions.apply(output, session, True, False)
    return found


def finite_gradients(x: Any, session: ClippingSession) -> Any:
    """``x``, whose gradient is set to 0 at positions where it is not finite."""
    if not isinstance(x, Tensor) or not x.requires_grad:
        return x
    return _FinitePositions.apply(x, session, False, True)


def unrecorded(session: ClippingSession, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A layer that is not recorded, which positions that are not finite do not leave either: one
    without trainable parameters, or in the first forward of re-entrant checkpointing."""
    units = session.positions
    if units is None:
        return own(*args, **kwargs)
    R, T = units.shape

    def has_positions(x: Any) -> bool:
        return isinstance(x, Tensor) and (tuple(x.shape[:2]) == (R, T) or x.shape[:1] == (R * T,))

    def closed(x: Any) -> Any:
        if not has_positions(x) or not x.is_floating_point():
            return x
        return _FinitePositions.apply(x, session, True, True)

    output = own(*(finite_gradients(x, session) if has_positions(x) else x for x in args), **kwargs)
    return type(output)(map(closed, output)) if type(output) in (tuple, list) else closed(output)


class _FinitePositions(torch.autograd.Function):
    """Values, gradients, or both with zeros at positions that are not finite."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, session: ClippingSession, values: bool, gradients: bool
    ) -> Tensor:
        ctx.lost_N, ctx.backend = _lost_on(x, session), session.backend
        ctx.gradients = gradients
        return _finite(x, ctx.lost_N, ctx.backend) if values else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:  # type: ignore[override]
        return _finite(G, ctx.lost_N, ctx.backend) if ctx.gradients else G, None, None, None


class _LayerByPosition(TappedLayer):
    """A tapped layer with a row for every position.

    What a rule returns is fresh, so zeros are written in place, and nothing is where all of it is
    finite. Should the rule have saved its output, or recorded the gradient, it is changed there as
    well: in rows of documents that get coefficient 0.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tap: Any, *others_inputs_and_params: Any
    ) -> Any:
        output = TappedLayer.forward(ctx, tap, *others_inputs_and_params)
        given = [x for x in others_inputs_and_params if isinstance(x, Tensor)]
        parts = output if isinstance(output, tuple) else (output,)
        ctx.lost_N, backend = _lost_on(parts[0], tap.session), tap.session.backend
        found = tuple(_own_finite(part, ctx.lost_N, given, backend) for part in parts)
        return found if isinstance(output, tuple) else found[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        def finite(grads: tuple[Any, ...], saved: tuple[Any, ...]) -> tuple[Any, ...]:
            shared = [x for x in (*grad_outputs, *saved) if isinstance(x, Tensor)]
            backend = ctx.tap.session.backend
            return tuple(_own_finite(grad, ctx.lost_N, shared, backend) for grad in grads)

        return backward_of(ctx, grad_outputs, finite)


apply_layer_by_position = apply_of(_LayerByPosition)


def _lost_on(x: Tensor, session: ClippingSession) -> Tensor:
    """Where positions that are not finite are noted, beside ``x``."""
    assert session.positions is not None
    return session.positions.lost_on(x.device)


def _own_finite(x: Any, lost_N: Tensor, shared: Sequence[Tensor], backend: str) -> Any:
    """Zeros at positions that are not finite: in place, but where others hold the memory."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    if not x.is_contiguous() or any(is_alias_of(x, other) for other in shared):
        return _finite(x, lost_N, backend)
    return finite_rows(x, lost_N, in_place=True, backend=backend)


def _finite(x: Tensor, lost_N: Tensor, backend: str) -> Tensor:
    """Zeros at positions that are not finite, in a fresh tensor; ``x`` has rows ``[N, ...]``, or
    ``[R, T, ...]``."""
    N = len(lost_N)
    rows = x.reshape(N, x.numel() // max(N, 1))
    return finite_rows(rows, lost_N, backend=backend).view(x.shape)
