"""Schedules of ``torch.distributed.pipelining`` for private models: one norm over all stages, one
stage in each process.

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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, distributed as dist, nn
from torch.nn import functional as F

from flash_clipping._compat import parts_of_schedule, pytree
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.session import ClippingSession
from flash_clipping.engine.grad_ledger import Norms
from flash_clipping.engine.grad_sample_module import GradSampleModuleFlashClipping
from flash_clipping.errors import (
    FlashClippingError,
    InvalidType,
    InvalidValue,
    NotServed,
    checked_number,
)
from flash_clipping.finish.backward_pass import BackwardPass
from flash_clipping.finish.clipping import Coefficients, Doubts
from flash_clipping.ops.error_bounds import upper_bound
from flash_clipping.ops.runtime.checks import check_on_device
from flash_clipping.pipelines.optimizer import PipelineFlashDPOptimizer, refuse_unserved

_DISAGREE = (
    "FC648 PrivateSchedule.step: the stages of the pipeline count different numbers of samples in "
    "this batch. Every process must be given the same batch."
)


def filled_up(values: Any, axis: int, samples: int, capacity: int) -> list[Any]:
    """``values`` of each round: ``capacity`` samples along ``axis`` of every tensor.

    Samples are made up of those that are there, in turn, so that they are as valid as these; where
    there are none, of the row that stands for them.
    """
    rows = max(1, samples)
    numbers = torch.arange(-(-rows // capacity) * capacity) % rows
    return [
        pytree.tree_map_only(Tensor, lambda x: x.index_select(axis, part.to(x.device)), values)  # noqa: B023
        for part in numbers.split(capacity)
    ]


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

    def _clip(self, params: list[nn.Parameter], norms_PB: Tensor, doubts: Doubts) -> Tensor:
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


class PrivateSchedule:
    """A schedule whose steps leave clipped sums, by norms over the parameters of all stages.

    Built around the schedule of this process's stage, in every process, and called in its place.
    The stage's module is wrapped by :class:`~flash_clipping.GradSampleModuleFlashClipping`
    (``make_private(distributed=Pipeline())`` does that) before the stage is made.

    Example::

        model, optimizer, loader = engine.make_private(module=part, ..., distributed=Pipeline())
        stage = PipelineStage(model, rank, world_size, device)
        schedule = PrivateSchedule(
            Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.CrossEntropyLoss()), microbatch_size=8)
        for x, y in loader:
            optimizer.zero_grad()
            schedule.step(x, target=y)
            optimizer.step()

    Records of layers are held for all micro-batches of a schedule's run, with ``Schedule1F1B`` as
    well.

    Args:
        schedule: a ``ScheduleGPipe`` or ``Schedule1F1B`` with a loss function, whose reduction is
            that of the wrapped module; its ``scale_grads`` is without meaning here.
        microbatch_size: samples of a micro-batch.

    Guarantees:
        Norms, coefficients and sums are those of one process with the whole model. All stages
        together release a sum that moves by at most 1.01 ``max_grad_norm`` when one sample is gone.
        A step adds one all-reduce of three float64 numbers for each sample to what the schedule
        itself communicates; it waits for no device.

    Raises:
        NotImplementedError: another schedule; ``mode="two_pass"``; ``clipping="per_layer"``;
            ``unit``; a compiled stage, or one that ``fully_shard`` was applied to; stages in
            some of the processes only.
        TypeError: the stage's module is not wrapped.
        ValueError: the loss reductions do not match, or ``microbatch_size`` is below 1.
    """

    def __init__(self, schedule: Any, *, microbatch_size: int):
        stage, count = _checked_parts(schedule)
        module: GradSampleModuleFlashClipping = stage.submod
        checked_number("microbatch_size", microbatch_size, "[1, inf)", example=8, whole=True)
        self.schedule, self.module = schedule, module
        self.capacity = count * microbatch_size
        self._stage, self._microbatches, self._size = stage, count, microbatch_size
        self._session = module._session
        self._session.calls.backward_pass_class = partial(StageBackwardPass, hold=self._hold)
        #: Backward passes that wait for coefficients, by their micro-batch; the one that runs.
        self._held: dict[int, StageBackwardPass] = {}
        self._microbatch = 0
        self._running = False
        module._watch.in_private_schedule = True
        # A schedule's run to learn shapes, on memory without values, is no part of a step.
        module.disable_hooks()
        stage.forward_one_chunk = self._recorded(stage.forward_one_chunk, backward=False)
        stage.backward_one_chunk = self._recorded(stage.backward_one_chunk, backward=True)

    # -- a step ---------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run the schedule on a batch of any size, and leave clipped sums in ``p.grad``.

        Every process calls it with the same batch; the first stage reads ``args``, the last one
        ``target``, and every stage ``kwargs``. A batch is filled up to whole micro-batches with
        samples that are made up, and are in no norm and no sum. A batch with more samples than
        micro-batches hold is run in several rounds. A batch without samples is given a row.

        Args:
            *args: of the first stage: tensors with samples along the batch axis.
            target: of the loss function, with samples along axis 0.
            losses: a list that the last stage puts the loss of every micro-batch into, with the
                samples that are made up.
            return_outputs: whether the last stage returns what it computed.
            **kwargs: of every stage's module: tensors with samples along the batch axis.

        Returns:
            In the last stage, its outputs for this batch; ``None`` in the others.

        Raises:
            FlashClippingError: it is not known how many samples there are, or stages count
                different numbers; a norm would be wrong.
            ValueError: another optimizer than :class:`PipelineFlashDPOptimizer` follows the module.
        """
        running = self.module.running_step
        if not isinstance(running.follower, PipelineFlashDPOptimizer | None):
            raise InvalidValue(
                f"FC642 PrivateSchedule.step: found {type(running.follower).__name__} as the "
                "module's optimizer, whose noise could be the same in all stages. Use "
                "make_private(distributed=Pipeline())."
            )
        axis = self._session.options.batch_axis
        samples, capacity = self._count(args, kwargs, target), self.capacity
        rounds = filled_up((args, kwargs), axis, samples, capacity)
        labels = filled_up(target, 0, samples, capacity)
        if losses is not None:
            losses.clear()
        outputs, found = [], []
        with self._step():
            for number, (given, named) in enumerate(rounds):
                of_losses: list[Any] = []
                output = self.schedule.step(
                    *(given if self._stage.is_first else ()),
                    target=labels[number] if self._stage.is_last else None,
                    losses=None if losses is None else of_losses,
                    return_outputs=return_outputs,
                    **named,
                )
                outputs.append(output)
                if losses is not None:
                    losses += of_losses
                found.append(self._clip(min(capacity, samples - number * capacity)))
            running.norms = Norms(
                found[0].params,
                torch.cat([one.norms_PB for one in found], 1),
                torch.cat([one.total_B for one in found]),
                torch.cat([one.upper for one in found]),
            )
            running.count_backward(running.norms.total_B, self._draw)
        return _joined(outputs, axis, capacity, max(1, samples))

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """The schedule's own: nothing is recorded."""
        return self.schedule.eval(*args, **kwargs)

    @contextmanager
    def _step(self) -> Iterator[None]:
        session, schedule = self._session, self.schedule
        before = session.rows.drawn, schedule.scale_grads
        # These are the batch's; the module is called with micro-batches. Sums are no means.
        session.rows.drawn, schedule.scale_grads = None, False
        session.rows.draws.paused = True
        self._running = True
        try:
            self.module.running_step.begin_backward(
                session.options.trainable(),
                self.module.clipping,
                self.module.grad_accumulation_allowed,
            )
            yield
        except RuntimeError as error:
            # Schedules put all that they were called with around what was raised.
            if isinstance(error.__cause__, FlashClippingError):
                raise error.__cause__ from None
            raise
        finally:
            self._running = False
            for backward_pass in self._held.values():
                backward_pass.forget()
            self._held.clear()
            session.rows.drawn, schedule.scale_grads = before
            session.rows.draws.paused = False

    def _recorded(self, run: Callable[..., Any], *, backward: bool) -> Callable[..., Any]:
        """A method of the stage, for one micro-batch, whose number comes first."""

        def recorded(number: int, *args: Any, **kwargs: Any) -> Any:
            if not self._running:
                if backward and self._stage.has_backward:
                    raise FlashClippingError(
                        f"FC640 {type(self.schedule).__name__}.step: found a step of the schedule "
                        "alone, which would leave no clipped sums. Call step() of the "
                        "PrivateSchedule."
                    )
                return run(number, *args, **kwargs)
            self._microbatch = number
            self._session.mode.enabled = True
            try:
                return run(number, *args, **kwargs)
            finally:
                self._session.mode.enabled = False

        return recorded

    def _count(self, args: Any, kwargs: Any, target: Any) -> int:
        """Samples in the batch."""
        axis, drawn = self._session.options.batch_axis, self._session.rows.drawn
        draws, given = self._session.rows.draws, tensors_in((args, kwargs, target))
        # What this process was called with is compared with the batch, where that matters.
        self._draw = draws.of_forward(given, axis) if given else draws.next()
        if drawn is None and self._draw is not None and not draws.ahead:
            drawn = self._draw.samples
        found = [(x, axis) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        found += [(x, 0) for x in pytree.tree_leaves(target) if isinstance(x, Tensor)]
        counts = {x.shape[at] if x.dim() > at else None for x, at in found}
        is_empty = drawn == 0 and counts <= {1}
        if drawn is not None:
            counts = {0} if is_empty else counts | {drawn}
        if not counts:
            raise FlashClippingError(
                "FC645 PrivateSchedule.step: found neither arguments nor a target, and no loader "
                "of make_private. Call step(x, target=y) with the same batch in every process."
            )
        (count, *others) = counts
        if others or count is None:
            shapes = ", ".join(str(tuple(x.shape)) for x, _ in found)
            drew = "" if drawn is None else f", and {drawn} samples that the loader drew"
            raise FlashClippingError(
                "FC645 PrivateSchedule.step: found arguments and a target of shapes "
                f"{shapes}{drew}; expected as many samples along axis {axis} of every argument and "
                "axis 0 of the target. What is the same for all samples belongs into the stage's "
                "module."
            )
        return count

    # -- norms over all stages ------------------------------------------------------------------

    def _hold(self, backward_pass: StageBackwardPass) -> None:
        """Keep the backward pass of the running micro-batch."""
        number, found = self._microbatch, backward_pass.norms_PB.shape[1]
        if found != self._size:
            raise FlashClippingError(
                f"FC645 PrivateSchedule: micro-batch {number} has {found} samples in this stage; "
                f"expected microbatch_size={self._size}. Chunk along axis "
                f"{self._session.options.batch_axis} (args_chunk_spec, kwargs_chunk_spec), in "
                "every stage."
            )
        self._held[number] = backward_pass

    def _norms(self, count: int) -> Norms:
        """The norms of this round's samples, the first ``count`` of all. All stages call it.

        Raises:
            FlashClippingError: this stage has recorded nothing of some micro-batch; or stages
                count different numbers of samples (on a GPU later).
        """
        M, B = self._microbatches, self._size
        trainable = bool(self._session.options.trainable())
        if trainable and len(self._held) < M:
            missing = sorted({*range(M)} - {*self._held})
            raise FlashClippingError(
                f"FC647 PrivateSchedule: backward reached no layer of this stage in micro-batches "
                f"{missing}, and its parameters are trainable. Is what the stage returns detached?"
            )
        held = [self._held[number] for number in range(M)] if trainable else []
        # Squared norms, what rounding may hide of them, and which samples are made up. In float64,
        # where no squared norm overflows that is finite.
        parts_3MB = torch.zeros(3, M, B, dtype=torch.float64, device=self._stage.device)
        for number, one in enumerate(held):
            parts_3MB[0, number] = one.norms_PB.double().square().sum(0)
            parts_3MB[1, number] = one.doubts.total(one.norms_PB[0]).double()
        made_up = parts_3MB[2].view(-1)
        made_up[count:] = 1
        dist.all_reduce(parts_3MB, group=self._stage.group)
        stages = dist.get_world_size(self._stage.group)
        check_on_device((made_up[:count] == 0).all() & (made_up[count:] == stages).all(), _DISAGREE)
        sq_n, doubt_n = parts_3MB[:2].view(2, -1)[:, :count]
        own = [one.norms_PB for one in held]
        own_Pn = torch.cat(own, 1)[:, :count] if own else sq_n.new_zeros(0, count)
        dtype = own_Pn.dtype if held else torch.float32
        total_n = sq_n.sqrt().to(dtype)
        upper_n = upper_bound(total_n, doubt_n.to(dtype))
        return Norms(self.module.trainable_parameters, own_Pn, total_n, upper_n)

    def _clip(self, count: int) -> Norms:
        """Clip what is held by norms over all stages; of samples behind the first ``count``,
        nothing."""
        with torch.no_grad():
            found = self._norms(count)
            coef_n = self.module._coefficients(found.upper)
            self._session.calls.non_finite.note(coef_n)
            coef_MB = F.pad(coef_n, (0, self.capacity - count)).view(-1, self._size)
            for number in sorted(self._held):
                self._held.pop(number).complete(coef_MB[number])
        return found


def _joined(outputs: list[Any], axis: int, capacity: int, rows: int) -> Any:
    """The outputs of all rounds as one, without samples that are made up."""

    def join(*parts: Any) -> Any:
        if not isinstance(parts[0], Tensor) or parts[0].dim() <= axis:
            return parts[0]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, axis)
        return joined.narrow(axis, 0, rows) if parts[0].shape[axis] == capacity else joined

    return pytree.tree_map(join, *outputs)


def _checked_parts(schedule: Any) -> tuple[Any, int]:
    """The stage of a schedule that is supported, and its number of micro-batches."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    if not isinstance(schedule, ScheduleGPipe | Schedule1F1B):
        raise NotServed(
            f"FC641 PrivateSchedule: found {type(schedule).__name__}; expected ScheduleGPipe or "
            "Schedule1F1B, in which one stage runs in a process and backward computes all "
            "gradients."
        )
    stage, loss_fn, count = parts_of_schedule(schedule)
    module = stage.submod
    if not isinstance(module, GradSampleModuleFlashClipping):
        raise InvalidType(
            f"FC642 PrivateSchedule: the stage's module is {type(module).__name__}; expected a "
            "GradSampleModuleFlashClipping, of make_private(distributed=Pipeline()): make the "
            "PipelineStage of what it returns."
        )
    settings = {name: getattr(module, name) for name in ("mode", "clipping", "unit")}
    refuse_unserved("PrivateSchedule", module, settings)
    if dist.get_world_size(stage.group) != dist.get_world_size():
        raise NotServed(
            f"FC641 PrivateSchedule: found a pipeline of {dist.get_world_size(stage.group)} "
            f"processes among {dist.get_world_size()}. Sums of several pipelines are not added up: "
            "use all processes as stages of one."
        )
    if isinstance(loss_fn, DPLossFastGradientClipping):
        raise InvalidValue(
            f"FC642 PrivateSchedule: found {type(loss_fn).__name__} as the schedule's loss_fn. "
            "Give the schedule the criterion that make_private was given, which returns a tensor."
        )
    reduction = getattr(loss_fn, "reduction", module.loss_reduction)
    if reduction != module.loss_reduction:
        raise InvalidValue(
            f"FC461 PrivateSchedule: loss_fn has reduction={reduction!r}, the module "
            f"loss_reduction={module.loss_reduction!r}. Norms would be off by the size of a "
            "micro-batch. Give both the same."
        )
    return stage, count
