"""Layers of a model whose units are parts of rows: documents packed end to end.

A layer that does the same with every position gets these as rows of its own, ``[N, ...]``, and what
it records of them becomes what belongs to units. All others are refused. That the documents of one
row do not reach each other, and that what a layer reads at a position is that position's, is shown
by :mod:`flash_clipping.capture.proof.positions`.

A document that is not finite does not leave a layer. Attention between layers multiplies what is
masked by 0, and 0 · inf is NaN: one document would take all others of its row with it, and the sum
would change by more than what one may add. So positions that are not finite become zeros wherever a
layer hands them on: its outputs in forward, the gradients of its inputs in backward. What it reads
or holds of one document concerns that document alone. The documents of such positions are noted
(:meth:`Units.lost_on`), and get coefficient 0 whatever their norms are: what a layer computes of
its zeros in backward need not be marked.

``R`` rows of the batch, ``T`` positions of each, ``N = R·T``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from flash_clipping._compat import apply_of, is_alias_of
from flash_clipping.capture.proof.reads import DIFFERENT, DIFFERENT_LOW, is_low
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tapped_layer import TappedLayer, backward_of
from flash_clipping.capture.units import Units
from flash_clipping.errors import FlashClippingError
from flash_clipping.ops.rows import finite_rows
from flash_clipping.rules.registry import Rule

_ALONE = "Give every document a row of its own, padded to one length, with a map of rows."


def refuse_layer(path: str, found: str, advice: str = _ALONE) -> NoReturn:
    """Say why a layer cannot be supported where units are parts of rows."""
    raise FlashClippingError(
        f"FC278 {path}: units are parts of rows (Documents with a map of positions), and {found}. "
        f"{advice}"
    )


class Positions:
    """How one call's inputs become rows, one for each position, and its output positions again.

    Attributes:
        folded: whether positions came as rows already, ``[N, ...]``.
    """

    def __init__(self, path: str, units: Units):
        self.path, self.units = path, units
        self.folded = False

    def rows(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """``args`` with ``[N, ...]`` in the place of ``[R, T, ...]``."""
        R, T = self.units.shape
        return tuple(self._of_one(x, R, T) if isinstance(x, Tensor) else x for x in args)

    def _of_one(self, x: Tensor, R: int, T: int) -> Tensor:
        least = 1 + x.is_floating_point()  # floats have features
        if x.dim() > least and tuple(x.shape[:2]) == (R, T):
            return x.flatten(0, 1)
        if x.dim() < least or x.shape[0] != R * T:
            refuse_layer(
                self.path,
                f"it reads a tensor of shape {tuple(x.shape)}; expected [{R}, {T}, ...], as the "
                "map has",
                "Keep all positions on the second axis of what it reads, in their order.",
            )
        self.folded = True
        return x

    def taken(
        self,
        rule: Rule,
        layer: nn.Module,
        session: ClippingSession,
        args: tuple[Any, ...],
        recomputed: bool,
    ) -> tuple[Any, ...]:
        """``args`` with a row for each position, as the layer's rule takes them.

        Raises:
            FlashClippingError: a convolution, attention, a normalization over positions.
        """
        if not rule.works_by_position(layer):
            refuse_layer(self.path, "this layer does not work position by position")
        rows = self.rows(args)
        note_read(self.path, session, rows[0], recomputed)
        if rule.folds:
            rows = tuple(x.unsqueeze(1) if isinstance(x, Tensor) else x for x in rows)
        return rows

    def back(self, output: Tensor) -> Tensor:
        """The output ``[N, ...]`` as the layer's own."""
        R, T = self.units.shape
        return output if self.folded else output.unflatten(0, (R, T))


def note_read(path: str, session: ClippingSession, rows: Tensor, recomputed: bool) -> None:
    """A layer reads these rows: note it before the first step; afterwards it must have been seen.

    Raises:
        FlashClippingError: it is reached for the first time.
    """
    call = session.current_forward
    if recomputed or call is None:
        return
    if call.reads is not None:
        call.begin_call(path)
        x = rows if rows.dim() > 1 else rows.unsqueeze(1)
        call.reads.note(call.next_read(path), x, 0, None, True)
    elif path not in session.rows.units_of_calls.proven:
        for kind in session.proof.kinds.values():
            kind.apart = -1
        raise FlashClippingError(
            f"FC230 {path}: this layer was reached for the first time, and units are parts of "
            "rows: it was not seen whether documents reach each other in what it reads. It is "
            "checked before the next forward: clear the gradients and run this step again."
        )


def by_position(
    path: str,
    session: ClippingSession,
    units: Units,
    own: Callable[..., Any],
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recomputed: bool,
) -> Any:
    """A module without a rule, which gets every position as a row ``[N, 1, ...]``.

    Args:
        own: its forward.
        run: its forward where what it records is recorded.

    Raises:
        FlashClippingError: it is called with something else than one tensor; or computes something
            else of positions that come one by one, before the first step.
    """
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        refuse_layer(
            path,
            "this module uses parameters itself and is called with something else than one tensor",
        )
    positions = Positions(path, units)
    (rows,) = positions.rows(args)
    note_read(path, session, rows, recomputed)
    rows = rows if positions.folded else rows.unsqueeze(1)
    output = unrecorded(session, run, (rows,), {})

    def back(x: Any) -> Tensor:
        if not isinstance(x, Tensor) or x.dim() == 0 or len(x) != len(rows):
            refuse_layer(path, "this module returns something else than one row for each")
        alone = not positions.folded and x.dim() > 1 and x.shape[1] == 1
        return positions.back(x.squeeze(1)) if alone else x

    found: Any = tuple(map(back, output)) if isinstance(output, tuple) else back(output)
    call = session.current_forward
    if not recomputed and call is not None and call.reads is not None:
        with torch.no_grad(), session.bypass():
            expected = own(*args)
        several = isinstance(found, tuple)
        pairs = zip(expected, found, strict=True) if several else [(expected, found)]
        if not all(_are_alike(x, y) for x, y in pairs):
            refuse_layer(path, "this module does not work position by position")
    return found


def _are_alike(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or not x.numel() or not x.is_floating_point():
        return x.shape == y.shape
    error, scale = (x.double() - y.double()).abs().max(), x.double().abs().max()
    different = DIFFERENT_LOW if is_low(x) or is_low(y) else DIFFERENT
    return bool(error <= different * scale) or not bool(torch.isfinite(scale))


# -- documents that are not finite -----------------------------------------------------------------


def unrecorded(session: ClippingSession, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A layer that is not recorded, which positions that are not finite do not leave either: one
    without trainable parameters, or in the first forward of re-entrant checkpointing."""
    units = session.rows.positions
    if units is None:
        return own(*args, **kwargs)
    R, T = units.shape

    def has_positions(x: Any) -> bool:
        return isinstance(x, Tensor) and (tuple(x.shape[:2]) == (R, T) or x.shape[:1] == (R * T,))

    def closed(x: Any) -> Any:
        return _finite_positions(x, session, True, True) if has_positions(x) else x

    args = [_finite_positions(x, session, False, True) if has_positions(x) else x for x in args]
    output = own(*args, **kwargs)
    return type(output)(map(closed, output)) if type(output) in (tuple, list) else closed(output)


def _finite_positions(
    x: Tensor, session: ClippingSession, values: bool = False, gradients: bool = False
) -> Tensor:
    """``x``, with zeros at positions where its values, or its gradient, are not finite."""
    if not (x.is_floating_point() if values else x.requires_grad):
        return x
    found: Tensor
    if not hasattr(x, "placements"):
        found = _FinitePositions.apply(x, session, values, gradients)
        return found
    from torch.distributed.tensor import Replicate

    cut: Any = x  # of which this process has some features, or a term of a sum
    lies = cut.placements
    if any(placement.is_shard(0) or (placement.is_shard(1) and x.dim() > 2) for placement in lies):
        raise FlashClippingError(
            "FC279 the model: units are parts of rows (Documents with a map of positions), and a "
            f"layer reads or returns a tensor that is cut along its positions ({lies}). Each "
            "process would have parts of the map. Leave SequenceParallel out of the plan."
        )
    whole = [placement if placement.is_shard() else Replicate() for placement in lies]
    own = _FinitePositions.apply(cut.to_local(grad_placements=whole), session, values, gradients)
    found = type(cut).from_local(
        own, cut.device_mesh, lies, run_check=False, shape=x.shape, stride=x.stride()
    )
    return found


class _FinitePositions(torch.autograd.Function):
    """Values, gradients, or both with zeros at positions that are not finite."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, session: ClippingSession, values: bool, gradients: bool
    ) -> Tensor:
        ctx.lost_N, ctx.backend = _lost_on(x, session), session.options.backend
        ctx.gradients = gradients
        return _finite(x, ctx.lost_N, ctx.backend) if values else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:
        return _finite(G, ctx.lost_N, ctx.backend) if ctx.gradients else G, None, None, None


class _LayerByPosition(TappedLayer):
    """A tapped layer with a row for every position.

    What a rule returns is fresh, so zeros are written in place, and nothing is where all of it is
    finite. Should the rule have saved its output, or recorded the gradient, it is changed there as
    well: in rows of documents that get coefficient 0.
    """

    @staticmethod
    def forward(ctx: Any, tap: Any, *others_inputs_and_params: Any) -> Any:
        output = TappedLayer.forward(ctx, tap, *others_inputs_and_params)
        given = [x for x in others_inputs_and_params if isinstance(x, Tensor)]
        parts = output if isinstance(output, tuple) else (output,)
        ctx.lost_N, backend = _lost_on(parts[0], tap.session), tap.session.options.backend
        found = tuple(_own_finite(part, ctx.lost_N, given, backend) for part in parts)
        return found if isinstance(output, tuple) else found[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        def finite(grads: tuple[Any, ...], saved: tuple[Any, ...]) -> tuple[Any, ...]:
            shared = [x for x in (*grad_outputs, *saved) if isinstance(x, Tensor)]
            backend = ctx.tap.session.options.backend
            return tuple(_own_finite(grad, ctx.lost_N, shared, backend) for grad in grads)

        return backward_of(ctx, grad_outputs, finite)


apply_layer_by_position = apply_of(_LayerByPosition)


def _lost_on(x: Tensor, session: ClippingSession) -> Tensor:
    """Where positions that are not finite are noted, beside ``x``."""
    assert session.rows.positions is not None
    return session.rows.positions.lost_on(x.device)


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
