"""Which optimizer a model gets: by how it is spread over processes, and how its noise is made."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist

from flash_clipping.engine.accounting import PldAccountant
from flash_clipping.engine.correlated_noise import CorrelatedFlashDPOptimizer
from flash_clipping.engine.optimizer import DistributedFlashDPOptimizer, FlashDPOptimizer
from flash_clipping.engine.pipeline_optimizer import PipelineFlashDPOptimizer
from flash_clipping.randomness.mechanisms import IndependentNoise


def private_optimizer(
    engine: Any, optimizer: Any, *, distributed: bool, **kwargs: Any
) -> FlashDPOptimizer:
    """The optimizer around ``optimizer``.

    Args:
        engine: what ``make_private`` was told.
        optimizer: a plain one.
        distributed: whether the model is data-parallel, or sharded.
        **kwargs: of the optimizer's class.
    """
    process = engine._process
    if not isinstance(process.noise, IndependentNoise):
        assert isinstance(engine.accountant, PldAccountant)  # see asked_process
        kwargs.update(mechanism=process.noise, before_noise=engine._sampler.check_step)
        correlated = CorrelatedFlashDPOptimizer(optimizer, **kwargs)
        engine.accountant.before_run = correlated.begin_run
        return correlated
    kwargs.update(noise_grid=engine._noise_grid)
    if engine._is_sharded:
        from flash_clipping.engine.sharded_optimizer import ShardedFlashDPOptimizer

        if distributed:
            kwargs["expected_batch_size"] *= dist.get_world_size()  # Opacus' is one process's
        return ShardedFlashDPOptimizer(optimizer, **kwargs)
    if engine._pipeline is not None:
        return PipelineFlashDPOptimizer(optimizer, group=engine._pipeline, **kwargs)
    cls = DistributedFlashDPOptimizer if distributed else FlashDPOptimizer
    return cls(optimizer, **kwargs)
