"""A logical batch in parts that fit in memory.

A part that runs out of memory is halved, and run again. Nothing of it has reached the optimizer by
then, which takes the clipped sums of a part when its backward has ended. So every sample is in the
sum of a step once, whatever was tried, and noise is drawn once, for the whole sum.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_clipping.capture.inputs import parts_of, rebuilt, tensors_in
from flash_clipping.engine.optimizer import DistributedFlashDPOptimizer, FlashDPOptimizer
from flash_clipping.errors import HALVE_PARTS, FlashClippingError, InvalidValue, checked_number

_T = TypeVar("_T")


def bounds_of(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Where so many parts of these samples begin and end: the largest first, by one at most."""
    ends = [start - (start - stop) * n // parts for n in range(parts + 1)]
    return [*zip(ends, ends[1:], strict=False)]


def count_of(batch: Any, axis: int) -> int | None:
    """How many rows all tensors of a batch have along this axis; ``None`` where they differ."""
    counts = {x.shape[axis] if x.dim() > axis else None for x in tensors_in(batch)}
    return counts.pop() if len(counts) == 1 else None


@dataclass
class Parts:
    """All samples of one step: parts, how many samples each has, and along which axis of its
    tensors, in nested containers."""

    parts: list[Any]
    sizes: list[int]
    axis: int = 0

    def samples(self, part: Any, size: int, start: int, stop: int) -> Any:
        """These samples of a part that has so many, as a part."""
        if isinstance(part, Tensor):
            return part.narrow(self.axis, start, stop - start)
        if part is None or isinstance(part, bool | int | float | str):
            return part
        if type(part) in (list, tuple):
            if len(part) == size and all(isinstance(text, str) for text in part):
                return part[start:stop]  # a text for each sample
            return type(part)([self.samples(value, size, start, stop) for value in part])
        if parts := parts_of("", part):
            cut = {key: self.samples(value, size, start, stop) for key, (_, value) in parts.items()}
            return rebuilt(part, cut)
        raise FlashClippingError(
            f"FC545 MicroBatches: found {type(part).__name__} in a batch that has to be cut; "
            "expected tensors, in lists, tuples, mappings and dataclasses. Let the function that "
            "is run hold what belongs to all samples."
        )

    def split(self, place: int, most: int, step: int = 1) -> None:
        """Put equal parts of so many samples at most in the place of one; all but the last have a
        multiple of ``step``, where that is possible."""
        part, size = self.parts[place], self.sizes[place]
        count = -(-size // most)
        pairs = [
            (start * step, min(stop * step, size))
            for start, stop in bounds_of(0, -(-size // step), count)
        ]
        if any(not 0 < stop - start <= most for start, stop in pairs):
            pairs = bounds_of(0, size, count)
        self.parts[place : place + 1] = [self.samples(part, size, *pair) for pair in pairs]
        self.sizes[place : place + 1] = [stop - start for start, stop in pairs]


@dataclass
class StepInParts:
    """Steps of a private optimizer whose backward passes are of parts of a batch.

    Attributes:
        optimizer: the private one.
        most: samples of a part, as far as is known; ``None``: any number.
        halves: whether a part that runs out of memory is halved.
        fits: so many samples are said to fit: a larger part that runs out of memory is cut into
            parts of as many.
    """

    optimizer: FlashDPOptimizer
    most: int | None = None
    halves: bool = True
    fits: int | None = None

    def begin(self) -> None:
        """A logical batch begins, or has failed: parts of one are let go of."""
        self.optimizer.discard_step()
        self.optimizer._step_skip_queue.clear()
        self.optimizer.zero_grad()

    def keep_sums(self) -> None:
        """Let the optimizer add up the sums of a part that is not the last."""
        self.optimizer.signal_skip_step(True)
        self.optimizer.step()

    def run(self, batch: Parts, work: Callable[[Any, int], _T]) -> list[_T]:
        """Run forward and backward, ``work(part, size)``, for every part, and leave the sums of the
        last one in ``p.grad``, for ``optimizer.step()``.

        Raises:
            torch.OutOfMemoryError: one sample does not fit, or parts are not halved.
        """
        self.begin()
        results: list[_T] = []
        try:
            while (place := len(results)) < len(batch.parts):
                size = batch.sizes[place]
                if self.most is not None and size > self.most:
                    batch.split(place, self.most)
                    continue
                less = self.fits if self.fits and size > self.fits else -(-size // 2) * self.halves
                has_memory = True
                try:
                    results.append(work(batch.parts[place], size))
                except torch.OutOfMemoryError as error:
                    if size < 2 or less == 0:
                        if HALVE_PARTS in (notes := getattr(error, "__notes__", [])):
                            notes.remove(HALVE_PARTS)
                        raise
                    has_memory = False
                if not has_memory:  # the error is gone, and what its frames held
                    self.most = less
                    self._let_go()
                elif len(results) < len(batch.parts):
                    self.keep_sums()
        except BaseException:
            self.begin()  # a step without parts, on whatever comes next, would take the sums
            raise
        return results

    def _let_go(self) -> None:
        """Let go of what a part that failed has left."""
        self.optimizer.zero_grad()  # the sums of earlier parts are not there
        device = next(iter(self.optimizer.params)).device
        for place in {device, torch.device("cpu")}:
            # Autograd's queue holds what it did not get to, until the next backward.
            torch.ones((), device=place, requires_grad=True).clone().backward()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class MicroBatches:
    """Runs forward and backward of a batch in as many parts as memory needs, by trying.

    Batches come whole from the loader that ``make_private`` returned, and there is one step for
    each. It begins with whole batches, or with what ``max_physical_batch_size`` says. A part that
    runs out of memory is halved, and so are all that follow::

        micro_batches = MicroBatches(optimizer)
        for x, y in loader:
            micro_batches(lambda x, y: criterion(model(x), y).backward(), x, y)
            optimizer.step()

    Args:
        optimizer: the private optimizer that ``make_private`` returned.
        max_physical_batch_size: samples of a part; ``"auto"``: as many as fit.

    Attributes:
        max_physical_batch_size: samples of a part at most, from now on; ``"auto"`` while whole
            batches fit.

    Guarantees:
        Every sample of the batch is in the sum of its step once. Neither batches nor noise are
        drawn again, and a step is accounted once.

    Raises:
        FlashClippingError: the loader's batches must come whole (units, ``max_batch_size``, batches
            in an order), rows are not samples (``unit``), or the model is in shards or stages,
            whose processes must run as many parts.
        ValueError: ``max_physical_batch_size`` is no number above 0.
    """

    def __init__(self, optimizer: FlashDPOptimizer, *, max_physical_batch_size: int | str = "auto"):
        module = getattr(optimizer, "_module", None)
        if module is None:
            raise InvalidValue(
                f"FC319 MicroBatches: found {type(optimizer).__name__}; expected the optimizer "
                "that make_private returned."
            )
        session, most = module._session, max_physical_batch_size
        if most != "auto":
            checked_number(
                "max_physical_batch_size", most, "[1, inf)", example='"auto"', whole=True
            )
        found, kinds = "", (FlashDPOptimizer, DistributedFlashDPOptimizer)
        if type(optimizer) not in kinds or optimizer._sharded is not None:
            found = "shards or stages, whose processes must run as many parts"
        elif session.rows.whole_batches or session.rows.units_of_calls.sample_of is not None:
            found = "batches that must come whole (units, max_batch_size, batches in an order)"
        if found:
            raise FlashClippingError(
                f"FC546 MicroBatches: found {found}; expected rows that are samples, in one "
                "process or with data parallelism. Give the loader a smaller batch_size; or, where "
                "batches may be cut, BatchMemoryManager a size that fits."
            )
        self._module = module
        self._step = StepInParts(optimizer, most=None if most == "auto" else int(most))

    @property
    def max_physical_batch_size(self) -> int | str:
        return "auto" if self._step.most is None else self._step.most

    def __call__(self, run: Callable[..., _T], *batch: Any) -> list[_T]:
        """Run ``run(*part)`` for every part of the batch; ``optimizer.step()`` comes next.

        Gradients are cleared before. ``run`` may be called again with the same samples.

        Args:
            run: computes the loss of its arguments, and calls ``backward()`` on it.
            *batch: what the loop was given: tensors with a row for each sample, in lists, tuples,
                mappings and dataclasses. Lists with a text for each sample are cut, too; other
                texts, numbers and ``None`` are handed on as they are.

        Returns:
            What ``run`` returned for the parts, in their order.

        Raises:
            torch.OutOfMemoryError: one sample does not fit.
            FlashClippingError: the batch cannot be cut, and has to be; or it is a part of one, by
                ``BatchMemoryManager``.
        """
        optimizer = self._step.optimizer
        if optimizer._loop is not None and optimizer._step_skip_queue:
            raise FlashClippingError(
                "FC547 MicroBatches: found a batch of BatchMemoryManager, which is a part already; "
                "expected whole batches, of the loader that make_private returned:\n"
                "    for x, y in loader:"
            )
        module, axis = self._module, self._module._session.options.batch_axis
        if (count := count_of(batch, axis)) is None:
            raise FlashClippingError(
                "FC545 MicroBatches: found tensors that have "
                f"{[tuple(x.shape) for x in tensors_in(batch)]} as shapes; expected a row along "
                f"axis {axis} for each sample. Let the function that is run hold what belongs "
                "to all samples."
            )

        def work(part: tuple[Any, ...], size: int) -> _T:
            if size != count:
                module.expect_samples(size)
            return run(*part)

        before = module._session.rows.drawn
        try:
            return self._step.run(Parts([batch], [count], axis), work)
        finally:
            module.expect_samples(before)
