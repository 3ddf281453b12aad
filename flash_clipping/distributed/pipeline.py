"""Stages of a pipeline: ``torch.distributed.pipelining``, one stage in each process.

A sample's gradient is over all stages, and so are its norm and its coefficient. A stage knows its
part of the squared norm only. So what backward passes have recorded is held until the last one of a
step; squared norms are added up over stages in one operation; then every stage clips by the same
coefficients.

Stages send each other tensors of a fixed size, and a Poisson batch has any. So a batch is cut into
*rounds* of as many samples as a schedule takes, and the last round is filled up with samples that
are made up. These get coefficient 0 and are in no sum and no norm.

Shape suffixes: ``M`` micro-batches, ``B`` samples of one, ``P`` parameters of the stage, ``n``
samples of a round that are not made up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn
from torch.nn import functional as F

from flash_clipping._compat import pytree
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import FlashClippingError
from flash_clipping.finish.backward_pass import BackwardPass
from flash_clipping.finish.clipping import Coefficients, Doubts
from flash_clipping.ops.error_bounds import upper_bound
from flash_clipping.ops.runtime.checks import check_on_device


@dataclass(frozen=True)
class Round:
    """The samples of a batch that one run of the schedule takes.

    Attributes:
        start: the first of them.
        count: how many there are; the others are made up.
        capacity: how many the schedule takes.
    """

    start: int
    count: int
    capacity: int

    def of(self, values: Any, axis: int, fill: int) -> Any:
        """``values`` with this round's samples in every tensor: ``capacity`` along ``axis``.

        Samples are made up of those that are there, in turn, so that they are as valid as these;
        ``fill`` is all that they hold where there are none.
        """
        return pytree.tree_map_only(Tensor, lambda x: self._of_tensor(x, axis, fill), values)

    def _of_tensor(self, x: Tensor, axis: int, fill: int) -> Tensor:
        part = x.narrow(axis, self.start, self.count)
        missing = self.capacity - self.count
        if not missing:
            return part
        if not self.count:
            return x.new_full((*x.shape[:axis], missing, *x.shape[axis + 1 :]), fill)
        again = torch.arange(missing, device=x.device) % self.count
        return torch.cat([part, part.index_select(axis, again)], axis)


def rounds(samples: int, capacity: int) -> list[Round]:
    """The rounds of a batch; one, of samples that are all made up, where there are none."""
    starts = range(0, max(samples, 1), capacity)
    return [Round(start, min(capacity, samples - start), capacity) for start in starts]


def samples_in(values: Any, axis: int, what: str) -> int | None:
    """How many samples these tensors have along ``axis``; ``None`` without tensors.

    Raises:
        FlashClippingError: they have different numbers.
    """
    tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]
    sizes = {x.shape[axis] if x.dim() > axis else None for x in tensors}
    if len(sizes) > 1 or None in sizes:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise FlashClippingError(
            f"PrivateSchedule.step: found {what} of shapes {shapes}; expected tensors with as many "
            f"samples along axis {axis}, which are split into micro-batches. What is the same for "
            "all samples belongs into the stage's module."
        )
    return sizes.pop() if sizes else None


class StageBackwardPass(BackwardPass):
    """The backward pass of one micro-batch, which ends with its norms, and waits.

    Attributes:
        norms_PB: of every sample's own gradient, over this stage's parameters.
        doubts: what rounding may hide of them.
    """

    norms_PB: Tensor
    doubts: Doubts

    def __init__(self, session: ClippingSession, hold: Callable[[StageBackwardPass], None]):
        super().__init__(session)
        self._hold = hold

    def _clip(
        self, params: list[nn.Parameter], norms_PB: Tensor, doubts: Doubts, one_device: bool
    ) -> Tensor:
        """Keep the norms; what is returned is nobody's coefficient."""
        self.norms_PB, self.doubts = norms_PB, doubts
        return norms_PB.new_ones(norms_PB.shape[1])

    def add_clipped_sums(self) -> None:
        """Not yet."""
        self._hold(self)

    def complete(self, coef_B: Tensor) -> None:
        """Add the clipped sums into ``p.grad``."""
        assert self.plan is not None
        with torch.no_grad():
            try:
                coef_B = coef_B * self.doubts.scale
                self.coef = Coefficients(coef_B, [*self.params.values()], self.plan)
                super().add_clipped_sums()
            finally:
                self.forget()


_DISAGREE = (
    "PrivateSchedule.step: the stages of the pipeline count different numbers of samples in this "
    "batch. Every process must be given the same batch."
)


@dataclass(frozen=True)
class Norms:
    """Of the samples of one round.

    Attributes:
        own_Pn: over this stage's parameters.
        total_n: over all parameters of all stages; the same in every process.
        upper_n: at least the norms of what is released of them.
    """

    own_Pn: Tensor
    total_n: Tensor
    upper_n: Tensor


class StageOfPipeline:
    """One stage, as the session of its module sees it.

    Args:
        session: of the stage's module; its backward passes wait for coefficients from now on.
        group: the processes of the pipeline.
        microbatches: how many a step has.
        size: samples of each.

    Attributes:
        microbatch: the one whose forward or backward runs.
    """

    def __init__(self, session: ClippingSession, group: Any, microbatches: int, size: int):
        self.session, self.group = session, group
        self.microbatches, self.size = microbatches, size
        self.microbatch = 0
        self._held: dict[int, StageBackwardPass] = {}
        session.backward_pass_class = partial(StageBackwardPass, hold=self._hold)

    def _hold(self, backward_pass: StageBackwardPass) -> None:
        """Keep the backward pass of the running micro-batch."""
        number, found = self.microbatch, backward_pass.norms_PB.shape[1]
        if found != self.size:
            raise FlashClippingError(
                f"PrivateSchedule: micro-batch {number} has {found} samples in this stage; "
                f"expected microbatch_size={self.size}. Chunk along axis "
                f"{self.session.batch_axis} (args_chunk_spec, kwargs_chunk_spec), and let stages "
                "hand on a row for every sample."
            )
        if number in self._held:
            raise FlashClippingError(
                f"PrivateSchedule: micro-batch {number} has had a backward pass in this step. "
                "Use ScheduleGPipe or Schedule1F1B as they are."
            )
        self._held[number] = backward_pass

    def forget(self) -> None:
        """Let go of all that is held."""
        for backward_pass in self._held.values():
            backward_pass.forget()
        self._held.clear()

    def norms(self, count: int, device: torch.device) -> Norms:
        """The norms of this round's samples, the first ``count`` of all. All stages call it.

        Raises:
            FlashClippingError: this stage has recorded nothing of some micro-batch; or stages
                count different numbers of samples (on a GPU: an error of the device).
        """
        M, B = self.microbatches, self.size
        trainable = bool(self.session.trainable())
        if trainable and len(self._held) < M:
            missing = sorted({*range(M)} - {*self._held})
            raise FlashClippingError(
                f"PrivateSchedule: backward reached no layer of this stage in micro-batches "
                f"{missing}, and its parameters are trainable. Is what the stage returns detached?"
            )
        held = [self._held[number] for number in range(M)] if trainable else []
        # Squared norms, what rounding may hide of them, and which samples are made up. In float64,
        # where no squared norm overflows that is finite.
        parts_3MB = torch.zeros(3, M, B, dtype=torch.float64, device=device)
        for number, one in enumerate(held):
            parts_3MB[0, number] = one.norms_PB.double().square().sum(0)
            parts_3MB[1, number] = one.doubts.total(one.norms_PB[0]).double()
        made_up = parts_3MB[2].view(-1)
        made_up[count:] = 1
        dist.all_reduce(parts_3MB, group=self.group)
        stages = dist.get_world_size(self.group)
        check_on_device((made_up[:count] == 0).all() & (made_up[count:] == stages).all(), _DISAGREE)
        sq_n, doubt_n = parts_3MB[:2].view(2, -1)[:, :count]
        own = [one.norms_PB for one in held]
        own_Pn = torch.cat(own, 1)[:, :count] if own else sq_n.new_zeros(0, count)
        dtype = own_Pn.dtype if held else torch.float32
        total_n = sq_n.sqrt().to(dtype)
        return Norms(own_Pn, total_n, upper_bound(total_n, doubt_n.to(dtype)))

    def complete(self, coef_n: Tensor) -> None:
        """Add the clipped sums of what is held into ``p.grad``, by these coefficients."""
        made_up = self.microbatches * self.size - len(coef_n)
        coef_MB = F.pad(coef_n, (0, made_up)).view(self.microbatches, self.size)
        for number in sorted(self._held):
            self._held.pop(number).complete(coef_MB[number])
