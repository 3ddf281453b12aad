"""What one stage of a pipeline holds during a step, and the norms over all stages.

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

from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import FlashClippingError
from flash_clipping.finish.backward_pass import BackwardPass
from flash_clipping.finish.clipping import Coefficients, Doubts
from flash_clipping.ops.error_bounds import upper_bound
from flash_clipping.ops.runtime.checks import check_on_device


class StageBackwardPass(BackwardPass):
    """The backward pass of one micro-batch.

    Attributes:
        norms_PB: of every sample's own gradient, over this stage's parameters.
        doubts: what rounding may hide of them.
    """

    norms_PB: Tensor
    doubts: Doubts

    def __init__(self, session: ClippingSession, hold: Callable[[StageBackwardPass], None]):
        super().__init__(session)
        self._hold = hold
        self._trainable: list[nn.Parameter] = []

    def finish(self) -> None:
        """Take the norms, and wait; a pass that fails lets go of its factors."""
        held = False
        with torch.no_grad():
            try:
                self.put_back()
                if self._is_for_parameters():
                    self.take_norms()
                    self._hold(self)
                    held = True
            finally:
                if not held:
                    self.forget()
                self.session.end_backward(held)

    def _clip(
        self, params: list[nn.Parameter], norms_PB: Tensor, doubts: Doubts, one_device: bool
    ) -> Tensor:
        """Keep the norms; what is returned is nobody's coefficient."""
        self._trainable, self.norms_PB, self.doubts = params, norms_PB, doubts
        return norms_PB.new_ones(norms_PB.shape[1])

    def complete(self, coef_B: Tensor) -> None:
        """Add the clipped sums into ``p.grad``."""
        assert self.plan is not None
        with torch.no_grad():
            try:
                coef_B = coef_B * self.doubts.scale
                self.coef = Coefficients(coef_B, self._trainable, self.plan)
                self.add_clipped_sums()
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
        session.backward_pass_class = partial(StageBackwardPass, hold=self.hold)

    def hold(self, backward_pass: StageBackwardPass) -> None:
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
        coef_MB = coef_n.new_zeros(self.microbatches * self.size)
        coef_MB[: len(coef_n)] = coef_n
        coef_MB = coef_MB.view(self.microbatches, self.size)
        for number in sorted(self._held):
            self._held.pop(number).complete(coef_MB[number])
