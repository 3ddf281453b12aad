"""What a loader drew, and what the model is called with: one draw for every step, by number.

A loader gives its batches with their numbers. A forward that records gradients is of one of those
that were given and not used yet, the first with as many rows. Where it matters which row is which
(privacy units, padding, batches in an order), it is of the batch that was given last, and all its
inputs have rows of that, in the same order: the loop calls the model with the batch of each step
before it takes the next one, or says which rows they are. Rows are compared by content: by a hash
of their bytes, which is the same on every device. On a GPU the comparison waits for nothing.

Shape suffixes: ``R`` rows of a batch, ``N`` elements of a row.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flash_clipping.errors import Coded, FlashClippingError
from flash_clipping.ops.runtime.checks import check_on_device

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Elements that are hashed at once.
_AT_ONCE = 1 << 22

ONE_DRAW = """ A step is accounted for as one draw. Call optimizer.step() for each batch; for \
larger steps use a larger batch size:
    DataLoader(dataset, batch_size=..., shuffle=True)"""

_MAY_BE_NOBODYS = """FC251 the model: the row of this call may be that of a batch without samples, \
which adds nothing. Call the model with the batch of each step, before the next one is taken from \
the loader."""

_OTHER_ROWS = """FC243 the model: the rows of this call are not those of the loader's last batch. \
Call the model with the batch of each step, before the next one is taken, and with its own tensors \
(change them in the dataset or inside of the model). Or say which row of the batch each row is, \
once for each batch:
    model.expect_rows(torch.arange(rows))"""


@dataclass(eq=False)
class DrawnBatch:
    """One batch, or a part of one, as a loader gives it.

    Args:
        number: which of the sampler's batches it is.
        samples: how many samples, or units, were drawn.
        rows: of its tensors.
        unit_R: int64, which unit each row belongs to; ``None``: rows are samples.
        tensors: those of the batch, where rows are compared.
        loop, place: which of the loops over the loader it is for, and its place there.
        rate: the probability that a sample was drawn with, once the loop is given it.
    """

    number: int
    samples: int
    rows: int
    unit_R: Tensor | None = None
    tensors: Sequence[Tensor] = ()
    loop: int = 0
    place: int = 0
    rate: float = 0.0
    #: Whether a forward has used it, an optimizer has taken its sums, a step was taken on it, and
    #: its loop is over.
    used: bool = False
    taken: bool = False
    stepped: bool = False
    left: bool = False
    #: Whether forwards are of parts of it, which somebody else counts.
    in_parts: bool = False
    #: Which row of the batch each row of the model's input is, if the loop said so.
    order_R: Tensor | None = None
    _versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._versions = [x._version for x in self.tensors]

    def with_a_row(self) -> DrawnBatch:
        """The same of a batch without samples, as a loader gives it: with one row, that counts
        nothing."""
        return replace(self, rows=1, unit_R=None if self.unit_R is None else torch.tensor([0]))

    def in_order(self, of_rows_R: Tensor) -> Tensor:
        """What holds for rows of the batch, for those of the model's input."""
        return of_rows_R if self.order_R is None else of_rows_R[self.order_R]

    def fits(self, inputs: Sequence[Tensor], axis: int) -> bool | Tensor:
        """Whether all inputs are rows of this batch, in its order. ``[]``, bool, on their device; a
        plain one where nothing had to be compared."""
        own = [
            x
            for x, version in zip(self.tensors, self._versions, strict=True)
            if x._version == version and x.dim() > axis and x.shape[axis] == self.rows
        ]
        found: bool | Tensor = bool(own)
        for given in inputs:
            if given.is_meta or given.dim() <= axis or given.shape[axis] != self.rows:
                continue
            if any(given is x for x in own):
                continue
            alike = [x for x in own if x.numel() == given.numel()]
            if given.layout != torch.strided or not alike:
                return False
            mine = row_hashes(given, axis)
            hashes = [row_hashes(x.to(given.dtype), axis) for x in alike]
            theirs = [of_x.to(given.device, non_blocking=True) for of_x in hashes]
            found = found & torch.stack([(mine == of_x).all() for of_x in theirs]).any()
        return found


def row_hashes(x: Tensor, axis: int = 0) -> Tensor:
    """A number for every row, by the bytes of its elements and their places.

    Args:
        x: of any dtype, with rows along ``axis``.

    Returns:
        ``[R]``, int64: equal for equal rows; the same on every device.
    """
    x = x.detach().movedim(axis, 0)
    if x.is_complex():
        x = torch.view_as_real(x)
    flat_RN = x.reshape(len(x), -1).contiguous()
    flat_RN = flat_RN.view(_INTEGERS[flat_RN.element_size()])
    total_R = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    step = max(1, _AT_ONCE // max(1, len(x)))
    for start in range(0, flat_RN.shape[1], step):
        part = flat_RN[:, start : start + step].long()
        place = torch.arange(start + 1, start + 1 + part.shape[1], device=x.device)
        total_R += (part * (scrambled(place) | 1)).sum(1)
    return total_R


def scrambled(numbers: Tensor) -> Tensor:
    """Numbers, int64, whose bits look random: each the same at every call and on every device."""
    numbers = numbers * 0x1E3779B97F4A7C15  # wraps, as all of this does
    numbers = (numbers ^ (numbers >> 29)) * 0x3F58476D1CE4E5B9
    return numbers ^ (numbers >> 32)


class NoStepWarning(Coded, UserWarning):
    """The loader gave a batch that no step was taken on."""


class Draws:
    """The batches that a loader has given to the loop, until forwards have used them.

    Args:
        strict: whether rows must be the batch's own, in its order.

    Attributes:
        waiting: in the order in which they were given.
        cleared: the last batch whose clipped sums were cleared, until another is given.
        paused: whether forwards are of parts that somebody else counts.
        ahead: whether batches were given before those in front of them were used.
        have_nobody: whether any batch had one row, and no sample.
    """

    def __init__(self, strict: bool = False):
        self.strict = strict
        self.waiting: list[DrawnBatch] = []
        self.paused = self.ahead = self.have_nobody = False
        self.cleared: DrawnBatch | None = None
        #: By loop: the place of the first batch that was stepped on, and how many were.
        self._steps: dict[int, tuple[int, int]] = {}
        self._loop = 0
        self._has_warned = False

    def __getstate__(self) -> dict[str, object]:  # a copy's next forward is of no loader's batch
        return self.__dict__ | {"waiting": [], "ahead": False, "cleared": None}

    # -- the loader ---------------------------------------------------------------------------

    def give(self, draw: DrawnBatch) -> None:
        """The loop is given this batch."""
        if self.cleared is not None and self.cleared.number != draw.number:
            if not self.cleared.stepped:
                self._warn(f"the clipped sums of batch {self.cleared.number} were cleared")
            self.cleared = None
        self.waiting = [other for other in self.waiting if not other.used]
        self.ahead = self.ahead or any(other.rows and not other.left for other in self.waiting)
        self.waiting.append(draw)
        self.have_nobody |= not draw.samples and draw.rows == 1

    def begin_epoch(self) -> None:
        """The loader starts again: what was given before it is not used any more, but the last."""
        left = [draw for draw in self.waiting if draw.left]
        self.waiting = [draw for draw in self.waiting if not draw.left] + left[-1:]
        self.ahead = False

    def end_epoch(self) -> None:
        """The loader has given its last batch, or nobody asks it for more."""
        for draw in self.waiting:
            draw.left = True

    def note_step(self, draw: DrawnBatch | None) -> None:
        """A step is taken on this batch, or on an unknown one.

        Batches before the first step of a loop may have been checked; those behind the last one
        may be yet to come.
        """
        if draw is None:
            first, steps = self._steps.get(self._loop, (0, 0))
        elif draw.stepped:
            return
        else:
            self._loop = draw.loop
            first, steps = self._steps.get(draw.loop, (draw.place, 0))
            if (left_out := draw.place - first - steps) > 0:
                self._warn(f"{left_out} of {draw.place + 1} batches of a loop were left out")
        self._steps[self._loop] = first, steps + 1

    def _warn(self, found: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"FC551 A batch was drawn, and no optimizer.step() followed: found that {found}. "
                "Epsilon holds only if leaving a batch out does not depend on its samples. Call "
                "optimizer.step() for every batch:\n"
                "    - a loss that is not finite: backward() and step() as always\n"
                "    - a batch with no sample: backward() and step() as always, on its row\n"
                "    - a batch that does not fit: flash_clipping.MicroBatches(optimizer)",
                NoStepWarning,
                stacklevel=4,
            )

    # -- the loop -----------------------------------------------------------------------------

    @property
    def current(self) -> DrawnBatch | None:
        """The batch that was used last, if the loader has given no other since."""
        used = [draw for draw in self.waiting if draw.used]
        return used[-1] if used else None

    def next(self) -> DrawnBatch | None:
        """The batch of a step whose rows are not checked."""
        return self._first(self.waiting[-1:] if self.strict else self._in_turn())

    def _first(self, fitting: Sequence[DrawnBatch]) -> DrawnBatch | None:
        """The first of batches that fit a call; refused where that may be another's, and one of
        them has no sample: its row must not be taken for a sample."""
        fitting = [draw for draw in fitting if not draw.taken] or fitting
        if self.have_nobody and fitting:
            is_over = fitting[0].stepped and fitting[0].rows == 1
            if is_over or len({bool(draw.samples) for draw in fitting}) > 1:
                raise FlashClippingError(_MAY_BE_NOBODYS)
        return self._use(fitting[0]) if fitting else None

    def of_part(self) -> DrawnBatch | None:
        """The batch of a forward whose rows somebody else counts: until its step, the last one."""
        draw = self.current
        if draw is None or draw.stepped:
            draw = self.next()
        if draw is not None:
            draw.in_parts = True
        return draw

    def look(self, inputs: Sequence[Tensor], axis: int) -> None:
        """A forward without gradients: the batch is used, though not for a step."""
        unused = [draw for draw in self.waiting if not draw.used]
        if len(unused) == 1 and unused[0].rows in _sizes(inputs, axis):
            self._use(unused[0])

    def of_forward(self, inputs: Sequence[Tensor], axis: int) -> DrawnBatch | None:
        """The batch of a forward that records gradients, or of a step that is replayed; ``None`` if
        it is of no known one.

        Args:
            inputs: the tensors that the model, or the step, is called with.
            axis: the batch axis.

        Raises:
            FlashClippingError: with ``strict``, it is of other rows than the last batch's, or of
                these in another order.
        """
        sizes = _sizes(inputs, axis)
        if self.strict:
            return self._use(self._with_rows(inputs, sizes, axis))
        in_turn = self._in_turn()
        fitting = [
            draw
            for place, draw in enumerate(in_turn)
            if draw.rows in sizes and (not draw.left or not place)
        ]
        if fitting:
            return self._first(fitting)
        if in_turn and not in_turn[-1].left:
            return self._use(in_turn[-1])  # it is said what was expected
        self.waiting = [draw for draw in self.waiting if not draw.left]
        if self.have_nobody and 1 in sizes:
            raise FlashClippingError(_MAY_BE_NOBODYS)
        return None

    def expect_rows(self, order: Tensor | None) -> None:
        """Which row of the batch that was given last each row of the model's input is.

        Raises:
            FlashClippingError: no batch was given, or it has no such rows.
        """
        if not self.waiting:
            raise FlashClippingError(
                "FC242 expect_rows: no batch of the loader that make_private returned was given. "
                "Call it after the batch is taken, and before the model."
            )
        draw = self.waiting[-1]
        if order is not None:
            order = torch.as_tensor(order).detach().cpu().long()
            if order.dim() != 1 or bool(((order < 0) | (order >= draw.rows)).any()):
                raise FlashClippingError(
                    f"FC242 expect_rows: found a tensor of shape {tuple(order.shape)}; expected, "
                    f"for every row of the model's input, a row of the batch, 0 to {draw.rows - 1}."
                )
        draw.order_R = order

    def _use(self, draw: DrawnBatch | None) -> DrawnBatch | None:
        """Those before it were left out."""
        if draw is not None:
            for other in self.waiting[: self.waiting.index(draw) + 1]:
                other.used = True
        return draw

    def _in_turn(self) -> list[DrawnBatch]:
        """In the order in which forwards use them: of one batch as many as there are before its
        step, and others (a generator's) after it where no other batch is meant."""
        current = self.current
        found = [draw for draw in self.waiting if not draw.used]
        if current is None:
            return found
        return [*found, current] if current.taken else [current, *found]

    def _with_rows(self, inputs: Sequence[Tensor], sizes: Sequence[int], axis: int) -> DrawnBatch:
        """The batch that was given last, if these are its rows."""
        if not self.waiting:
            raise FlashClippingError(
                "FC244 the model: make_private was called with Users, max_batch_size=... or "
                "batches in an order, and no batch of the loader that it returned was given for "
                "this forward. Take batches from it (BatchMemoryManager with num_workers=0); run "
                "other data under torch.no_grad()."
            )
        draw = self.waiting[-1]
        rows = draw.rows if draw.order_R is None else len(draw.order_R)
        if rows not in sizes:
            found = " or ".join(map(str, sizes)) or "unknown size"
            raise FlashClippingError(
                f"FC243 the model: called with a batch of {found} rows; expected the {rows} rows "
                "of the loader's last batch, all at once."
            )
        if draw.order_R is None:
            fits = draw.fits(inputs, axis)
            if isinstance(fits, Tensor):
                check_on_device(fits, _OTHER_ROWS)
            elif not fits:
                raise FlashClippingError(_OTHER_ROWS)
        return draw


def _sizes(inputs: Sequence[Tensor], axis: int) -> list[int]:
    return list(dict.fromkeys(x.shape[axis] for x in inputs if x.dim() > axis))


def of_one_draw(draws: Iterable[DrawnBatch | None]) -> DrawnBatch | None:
    """The draw that they all are parts of.

    Raises:
        FlashClippingError: they are several.
    """
    found = {draw.number: draw for draw in draws if draw is not None}
    if len(found) > 1:
        listed = ", ".join(map(str, sorted(found)))
        raise FlashClippingError(
            f"FC510 One step has gradients of batches {listed} of the loader.{ONE_DRAW}\n"
            "Or an earlier forward never goes backward. Before the next forward:\n"
            "    optimizer.zero_grad()"
        )
    return found.popitem()[1] if found else None
