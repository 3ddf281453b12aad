"""Layers of a model whose units are parts of rows: documents packed end to end.

``R`` rows of the batch, ``T`` positions of each, ``N = R·T``, ``U`` units, ``d`` features.

A layer that does the same with every position gets these as rows of its own, ``[N, ...]``, and what
it records of them becomes what belongs to units. All others are refused. That the documents of one
row do not reach each other, and that what a layer reads at a position is that position's, is shown
by :mod:`flash_clipping.capture.proof.positions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from flash_clipping.capture.finite_positions import finite_gradients, zero_nonfinite
from flash_clipping.capture.row_values import DIFFERENT, DIFFERENT_LOW, is_low
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.units import Units
from flash_clipping.errors import FlashClippingError
from flash_clipping.rules.registry import Rule

_ALONE = (
    "Give every document a row of its own, padded to one length, with a map of rows; or freeze "
    "this layer's parameters."
)


def refuse_layer(path: str, found: str, advice: str = _ALONE) -> NoReturn:
    """Say why a layer cannot be served where units are parts of rows."""
    raise FlashClippingError(
        f"{path}: units are parts of rows (sample_of with a map of positions), and {found}. "
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

    def rows(self, args: tuple[Any, ...], least: int = 1) -> tuple[Any, ...]:
        """``args`` with ``[N, ...]`` in the place of ``[R, T, ...]``.

        ``least``: axes that a floating tensor has behind its positions.
        """
        R, T = self.units.shape
        found: list[Any] = []
        for x in args:
            if not isinstance(x, Tensor):
                found.append(x)
                continue
            behind = least if x.is_floating_point() else 0
            if x.dim() >= 2 + behind and tuple(x.shape[:2]) == (R, T):
                found.append(x.flatten(0, 1))
            elif x.dim() >= 1 + behind and x.shape[0] == R * T:
                found.append(x)
                self.folded = True
            else:
                refuse_layer(
                    self.path,
                    f"it reads a tensor of shape {tuple(x.shape)}; expected [{R}, {T}, ...], as "
                    "the map has",
                    "Keep all positions on the second axis of what it reads, in their order; or "
                    "freeze this layer's parameters.",
                )
        return tuple(found)

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
    elif path not in session.units_of_calls.proven:
        session.units_of_calls.apart.clear()
        raise FlashClippingError(
            f"{path}: this layer was reached for the first time, and units are parts of rows: it "
            "was not seen whether documents reach each other in what it reads. It is looked at "
            "before the next forward: clear the gradients and run this step again."
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
    output = run(finite_gradients(rows, session))
    parts = output if isinstance(output, tuple) else (output,)
    if any(not isinstance(x, Tensor) or x.dim() == 0 or len(x) != len(rows) for x in parts):
        refuse_layer(path, "this module returns something else than one row for each")
    alone = not positions.folded
    found = tuple(
        positions.back(zero_nonfinite(x, session).squeeze(1))
        if alone and x.dim() > 1 and x.shape[1] == 1
        else zero_nonfinite(x, session)
        for x in parts
    )
    call = session.current_forward
    if not recomputed and call is not None and call.reads is not None:
        with torch.no_grad(), session.bypass():
            expected = own(*args)
        _compare(path, expected if isinstance(output, tuple) else (expected,), found)
    return found if isinstance(output, tuple) else found[0]


def _compare(path: str, expected: Any, found: tuple[Tensor, ...]) -> None:
    """Refuse a module that computes something else of positions that come one by one."""
    for x, y in zip(expected, found, strict=True):
        if x.shape == y.shape and (not x.numel() or not x.is_floating_point()):
            continue
        same = x.shape == y.shape
        if same:
            error, scale = (x.double() - y.double()).abs().max(), x.double().abs().max()
            different = DIFFERENT_LOW if is_low(x) or is_low(y) else DIFFERENT
            same = bool(error <= different * scale) or not bool(torch.isfinite(scale))
        if not same:
            refuse_layer(path, "this module does not work position by position")
