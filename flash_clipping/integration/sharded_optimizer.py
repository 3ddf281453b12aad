"""The optimizer of a model that ``fully_shard`` was applied to."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from flash_clipping._compat import assert_async, functions_of_optimizer
from flash_clipping.errors import FlashClippingError
from flash_clipping.integration.optimizer import FlashDPOptimizer
from flash_clipping.integration.samplers import ShardedPoissonSampler
from flash_clipping.integration.step_record import StepRecord
from flash_clipping.ops.noise import noisy_means
from flash_clipping.sharded.reducer import as_sharded, device_of
from flash_clipping.sharded.shard_noise import ShardGenerators, shared_key

_check_unused, _mark_used, _ = functions_of_optimizer()

_CHANGED = (
    "p.grad of a shard is not the clipped sum that backward() left, so noise for the clipping "
    "bound would not hide a sample. It was changed between backward() and step() "
    "(torch.nn.utils.clip_grad_norm_, a trainer's gradient clipping). Leave p.grad alone."
)


class ShardedFlashDPOptimizer(FlashDPOptimizer):
    """:class:`~flash_clipping.FlashDPOptimizer` for shards: ``DTensor`` parameters.

    Every process adds noise to its own shards (:mod:`flash_clipping.sharded.shard_noise`): together
    that is one draw for every element, as in one process. No process holds noise of a whole
    parameter, and replicas stay bitwise equal.

    Args:
        optimizer: made of the model's parameters after ``fully_shard``.
        expected_batch_size: of all processes together.
        generator: where the key of the noise comes from; of all processes' together.
        **kwargs: as in :class:`~flash_clipping.FlashDPOptimizer`.

    Raises:
        NotImplementedError: ``secure_mode``.
        FlashClippingError: in ``signal_skip_step``, from a ``BatchMemoryManager`` of another loader
            than ``make_private`` returned.
    """

    _serves_shards = True

    def __init__(
        self, optimizer: Any, *, secure_mode: bool = False, generator: Any = None, **kwargs: Any
    ):
        if secure_mode:
            raise NotImplementedError(
                "secure_mode=True: found a model that fully_shard was applied to. Noise of shards "
                "is drawn from generators that processes share, which a secure generator does not "
                "allow. Use secure_mode=False, or one process."
            )
        super().__init__(optimizer, secure_mode=False, generator=generator, **kwargs)
        self._shard_generators: ShardGenerators | None = None

    def follow(self, module: Any) -> None:
        """As :meth:`FlashDPOptimizer.follow`; all processes call it together."""
        if module._sharded is None:
            raise ValueError(
                "ShardedFlashDPOptimizer: found a model that fully_shard was not applied to when "
                "it was wrapped. Use FlashDPOptimizer."
            )
        super().follow(module)
        self._mesh = module._sharded.mesh
        self._shard_generators = ShardGenerators(shared_key(self._mesh, self.generator))

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """As in Opacus: every process skips the same steps.

        ``BatchMemoryManager`` is given parts by the loader's sampler, as many in every process,
        which also knows which of them is the last.
        """
        caller = sys._getframe(1)
        if caller.f_code.co_flags & inspect.CO_GENERATOR:
            sampler = getattr(caller.f_locals.get("self"), "sampler", None)
            if not isinstance(sampler, ShardedPoissonSampler) or not sampler.gives_parts:
                raise FlashClippingError(
                    "BatchMemoryManager: found a model that fully_shard was applied to, and a "
                    f"loader with {type(sampler).__name__}. Processes would split their batches "
                    "into different numbers of parts, and wait for each other for ever. Give it "
                    "the loader that make_private returned, with poisson_sampling=True."
                )
            do_skip = not sampler.is_last_part
        self._signal(do_skip, caller)

    def _checked(self, params: Sequence[Any]) -> StepRecord | None:
        record = super()._checked(params)
        if record is None:
            self._generators_of_shards()  # says what is missing
        slots = self._module._sharded.slots
        same = torch.stack([slots.unchanged(p) for p in params])
        if same.is_cuda:
            assert_async(same.all(), _CHANGED)  # without waiting for the device
        elif not bool(same.all()):
            raise ValueError(_CHANGED)
        return record

    def add_noise(self) -> None:
        std, divisor = self._noise_std(), self._divisor()
        by_generator: dict[torch.Generator, list[Any]] = {}
        for p in self.params:
            _check_unused(p.summed_grad)
            by_generator.setdefault(self._generators_of_shards().of_shard(p), []).append(p)
        used = [*by_generator] if std else []
        self._drawn.check(used)
        self._drawn.note(used)
        for generator, params in by_generator.items():
            sums: list[Tensor] = [p.summed_grad.to_local() for p in params]
            dtypes = [self._noisy_dtype(p) for p in params]
            noisy = noisy_means(sums, std, divisor, dtypes=dtypes, generator=generator)
            for p, shard in zip(params, noisy, strict=True):
                p.grad = as_sharded(p, shard.view(p.to_local().shape))
                _mark_used(p.summed_grad)
        self._drawn.note_end(used)

    def _generators_of_shards(self) -> ShardGenerators:
        if self._shard_generators is None:
            raise FlashClippingError(
                "ShardedFlashDPOptimizer: found a step without a model to follow. Call "
                "optimizer.follow(wrapped_model) first (make_private does)."
            )
        return self._shard_generators

    def _generators(self, sums: Sequence[Tensor]) -> list[torch.Generator]:
        raise AssertionError("generators go by shards, not by sums")

    def _noisy_count(self, count: Tensor, std: float) -> Tensor:
        """All processes count, and draw the same noise."""
        count = count.to(device_of(self._mesh))
        for dim in range(self._mesh.ndim):
            dist.all_reduce(count, op=dist.ReduceOp.SUM, group=self._mesh.get_group(dim))
        generator = self._generators_of_shards().of_all()
        noise = torch.normal(0.0, std, (1,), generator=generator, dtype=torch.float64)
        return count + noise.to(count.device).squeeze(0)
