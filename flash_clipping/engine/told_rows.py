"""What a loader, or the user, tells of the rows of calls. Calls of a plain model do not ask."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from flash_clipping.capture.batch_size_checks import check_against_loader
from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.proof.positions import are_apart
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.units import Units
from flash_clipping.engine.model_watch import ModelWatch
from flash_clipping.errors import ONE_BY_ONE


class Told(NamedTuple):
    """What is told of the rows of one call."""

    #: The loader's batch that it is of, if that is known.
    draw: DrawnBatch | None = None
    #: Whether its rows are no sample's: the loader has drawn none.
    nobody: bool = False
    #: Which unit each row belongs to; ``None``: rows are samples.
    units: Units | None = None
    #: Whether it need not be looked at which rows are samples.
    is_known: bool = False


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
        self.given, kwargs = self.session.units_of_calls.argument(module, args, kwargs)
        return args, kwargs

    def of_call(
        self, module: nn.Module, tensors: list[Tensor], args: tuple[Any, ...], kwargs: Any
    ) -> Told:
        """What is told of a call that begins, with these tensors among its arguments."""
        session, (given, self.given) = self.session, (self.given, None)
        draw, units = session.draw_of(tensors), None
        nobody = session.are_nobody(draw)
        if session.units_of_calls.are_known:
            units = session.units_of(given, tensors, draw, nobody)
        if (watch := self.watch) is None:
            return Told(draw, nobody, units)
        if self.sharded is not None:
            self.sharded.is_empty = nobody
        if units is None or not units.by_position:
            return Told(draw, nobody, units, is_known=nobody and self.sharded is None)
        if session.may_prove():
            unknown = not are_apart(session, units, watch.guards.count, args, kwargs)
            watch.prove_if(unknown, watch.subject(module, args, kwargs), positions=units)
        return Told(draw, nobody, units, is_known=True)

    def note(self, told: Told, forward: ForwardCall) -> None:
        """The call is recorded as this one. Raises an error for another size than was told."""
        session = self.session
        forward.draw, forward.of_nobody = told.draw, told.nobody
        forward.counted_rows = session.padding.of_call(told.draw, session.captured is not None)
        check_against_loader(session, forward, ONE_BY_ONE if self.watch is not None else "")
