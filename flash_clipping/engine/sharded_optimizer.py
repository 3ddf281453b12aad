"""The optimizer of a model that ``fully_shard`` was applied to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flash_clipping.distributed.parameter_slots import ParameterSlots, local_of
from flash_clipping.distributed.process_groups import device_of, shard_of
from flash_clipping.engine.grad_ledger import StepRecord
from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from flash_clipping.engine.optimizer import FlashDPOptimizer
from flash_clipping.errors import FlashClippingError, InvalidValue


class ShardedFlashDPOptimizer(FlashDPOptimizer):
    """:class:`~flash_clipping.FlashDPOptimizer` for shards: ``DTensor`` parameters.

    Every process adds noise to its own shards
    (:func:`~flash_clipping.distributed.process_groups.shard_number`): together that is one draw for
    every element, as in one process. No process holds noise of a whole parameter, and replicas stay
    bitwise equal.

    Args:
        optimizer: made of the model's parameters after ``fully_shard``.
        expected_batch_size: of all processes together.
        **kwargs: as in :class:`~flash_clipping.FlashDPOptimizer`. The key of the noise comes from
            the streams of all processes together.

    Raises:
        FlashClippingError: in ``signal_skip_step``, from a ``BatchMemoryManager`` of another loader
            than ``make_private`` returned.
    """

    _serves_shards = True
    _processes: Any = None

    def follow(self, module: GradSampleHooksFlashClipping) -> None:
        """As :meth:`FlashDPOptimizer.follow`; all processes call it together."""
        if module._sharded is None:
            raise InvalidValue(
                "FC605 ShardedFlashDPOptimizer: found a model that fully_shard was not applied to "
                "when it was wrapped. Use FlashDPOptimizer."
            )
        before = module.running_step.follower
        super().follow(module)
        self._processes = module._sharded.processes
        self.stream = self._processes.shared_stream(self.stream)
        if before is not None and before is not self:
            self.stream.load_state_dict(before.stream.state_dict())

    def _refuse_parts_of(self, sampler: object) -> None:
        super()._refuse_parts_of(sampler)
        raise FlashClippingError(
            "FC604 BatchMemoryManager: found a model that fully_shard was applied to, and a loader "
            f"with {type(sampler).__name__}: processes would split batches into different numbers "
            "of parts. Give it the loader that make_private returned, with poisson_sampling=True."
        )

    def _checked(self, params: Sequence[Any]) -> StepRecord | None:
        record = super()._checked(params)
        if record is None:
            raise FlashClippingError(
                "FC605 ShardedFlashDPOptimizer: found a step without a model to follow. Call "
                "optimizer.follow(wrapped_model) first (make_private does)."
            )
        return record

    def _own(self, tensor: Tensor) -> Tensor:
        return local_of(tensor)

    def _placed(self, param: Tensor, own: Tensor) -> Tensor:
        slots: ParameterSlots = self._module._sharded.slots
        return slots.as_sharded(param, own.view(local_of(param).shape))

    def _shards(self) -> list[int]:
        return [shard_of(p) for p in self.params]

    def _noisy_count(self, count: Tensor, std: float) -> Tensor:
        """All processes count their samples, each of them once, and draw the same noise."""
        count = self._processes.reduce(count.to(device_of(self._processes.mesh)), samples=True)
        return super()._noisy_count(count, std)
