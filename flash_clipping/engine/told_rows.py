"""What a loader, or the user, tells of the rows of calls. Calls of a plain model do not ask."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flash_clipping.capture.batch_size_checks import check_against_loader
from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.capture.forward_call import ForwardCall, in_backward
from flash_clipping.capture.padding import NO_ROW
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.units import Units
from flash_clipping.engine.model_watch import ModelWatch
from flash_clipping.errors import ONE_BY_ONE


class Told(NamedTuple):
    """What is told of the rows of one call."""

    #: The loader's batch that it is of, if that is known.
    draw: DrawnBatch | None = None
    #: Whether the loader has drawn no sample, so that its row counts nothing.
    nobody: bool = False
    #: Which unit each row belongs to; ``None``: rows are samples.
    units: Units | None = None
    #: Whether it need not be checked which rows are samples.
    is_known: bool = False


def draw_of(session: ClippingSession, tensors: list[Tensor]) -> DrawnBatch | None:
    """The loader's batch that the root is called with; a call that is recorded and is of several,
    or of other rows, is refused."""
    rows, axis = session.rows, session.options.batch_axis
    draws = rows.draws
    known = draws.waiting or draws.strict or draws.have_nobody
    if not known or in_backward() or session.calls.captured is not None:
        return None
    if not torch.is_grad_enabled():
        draws.look(tensors, axis)
        return None
    if draws.paused:
        return None
    counted = rows.drawn is not None or rows.units_of_calls.sample_of is not None
    if counted and not draws.strict:
        return draws.of_part()  # somebody else counts; or rows are no samples
    return draws.of_forward(tensors, axis)


class ToldRows:
    """Finds what is told of calls of a wrapped model: draw, number of rows, padding and units.

    Args:
        watch: looks at calls whose units are parts of rows; ``None`` where no layer is tapped.
        sharded: of a model with shards, whose processes all look at their calls.
    """

    def __init__(self, session: ClippingSession, watch: ModelWatch | None, sharded: Any):
        self.session, self.watch, self.sharded = session, watch, sharded
        #: The argument that holds the map of units, of the call that begins.
        self.given: Any = None

    def take_map(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take the map of units out of a call's arguments, where the model does not know it."""
        self.given, kwargs = self.session.rows.units_of_calls.argument(module, args, kwargs)
        return args, kwargs

    def of_call(
        self, module: nn.Module, tensors: list[Tensor], args: tuple[Any, ...], kwargs: Any
    ) -> Told:
        """What is told of a call that begins, with these tensors among its arguments."""
        session, (given, self.given) = self.session, (self.given, None)
        draw, nobody, units = draw_of(session, tensors), False, None
        if torch.is_grad_enabled() and not in_backward():
            if session.rows.padding.rows is None:  # no mask says which rows count
                nobody = session.rows.drawn == 0 or (draw is not None and not draw.samples)
            if session.rows.units_of_calls.are_known:
                units = self._units_of(given, tensors, draw, nobody)
        if (watch := self.watch) is None:
            return Told(draw, nobody, units)
        if units is None or not units.by_position:
            # A row that counts nothing is checked only where it comes first.
            looked = self.sharded is None and bool(session.proof.proven_with)
            return Told(draw, nobody, units, is_known=nobody and looked)
        if session.may_prove():
            subject = watch.subject(module, args, kwargs)
            unknown = len(units.map) > 0 and subject.kind.apart != watch.parameters.count
            watch.prove_if(unknown, subject, positions=units)
        return Told(draw, nobody, units, is_known=True)

    def _units_of(
        self, given: Any, tensors: list[Tensor], draw: DrawnBatch | None, nobody: bool
    ) -> Units | None:
        """The units of a call, where these are no rows, by this map if it got one, which must
        fit."""
        rows = self.session.rows
        drawn = 1 if nobody else rows.drawn
        if drawn is None and draw is not None and not rows.draws.ahead:
            drawn = draw.samples
        return rows.units_of_calls.of_call(given, tensors, drawn, draw)

    def note(self, told: Told, forward: ForwardCall) -> None:
        """The call is recorded as this one. Raises an error for another size than was told."""
        session = self.session
        forward.draw, captured = told.draw, session.calls.captured is not None
        padding = session.rows.padding
        forward.counted_rows = NO_ROW if told.nobody else padding.of_call(told.draw, captured)
        check_against_loader(session, forward, ONE_BY_ONE if self.watch is not None else "")
