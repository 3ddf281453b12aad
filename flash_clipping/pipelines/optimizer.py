"""The optimizer of a stage in a pipeline, and what ``make_private`` is asked for."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist, optim

from flash_clipping.distributed import has_shards
from flash_clipping.distributed.process_groups import shared_stream
from flash_clipping.engine.optimizer import FlashDPOptimizer
from flash_clipping.engine.options import Pipeline
from flash_clipping.errors import InvalidValue, NotServed

#: Values of ``make_private``'s arguments that are built for pipelines.
_SERVED: dict[str, tuple[Any, ...]] = {
    "mode": ("one_pass",),
    "clipping": ("flat", "automatic"),
    "poisson_sampling": (True,),
    "unit": (None,),
}


class PipelineFlashDPOptimizer(FlashDPOptimizer):
    """:class:`~flash_clipping.FlashDPOptimizer` for one stage's parameters.

    Every process adds noise to the parameters of its stage, by the bound of the whole model's
    norms: together that is one draw for every element, as in one process. Noise of different stages
    is independent, however processes are seeded. All processes make their optimizers together.

    Args:
        optimizer: of the stage's parameters.
        group: the processes of the pipeline; all processes if ``None``.
        **kwargs: as in :class:`~flash_clipping.FlashDPOptimizer`. The key of the noise comes from
            the streams of all processes together.
    """

    def __init__(
        self, optimizer: optim.Optimizer, *, group: dist.ProcessGroup | None = None, **kwargs: Any
    ):
        super().__init__(optimizer, **kwargs)
        self._group = dist.group.WORLD if group is None else group
        self.stream = shared_stream([self._group], self.stream)

    def _shards(self) -> list[int]:
        return [dist.get_rank(self._group)] * len(self.params)


def pipeline_group(distributed: Any, settings: dict[str, Any]) -> Any:
    """The processes of the pipeline that ``make_private`` is told of; ``None`` without one.
    ``NotImplementedError`` for what is not built for pipelines."""
    if not isinstance(distributed, Pipeline):
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidValue(
            "FC644 distributed=Pipeline(): torch.distributed is not initialised. Start the stages' "
            "processes with torchrun, and call torch.distributed.init_process_group first."
        )
    refuse_unserved("distributed=Pipeline()", settings["module"], settings)
    return dist.group.WORLD if distributed.group is None else distributed.group


def refuse_unserved(who: str, module: Any, settings: dict[str, Any]) -> None:
    """Raise ``NotImplementedError`` for what is not built for pipelines."""
    if has_shards(module) or getattr(module, "_sharded", None) is not None:
        raise NotServed(
            f"FC643 {who}: found a stage that fully_shard was applied to, for which it is not "
            "built. Leave fully_shard out, or shard the whole model without a pipeline."
        )
    for name, works in _SERVED.items():
        value = settings.get(name, works[0])
        if value not in works:
            shown = value if isinstance(value, str | bool) else "..."
            raise NotServed(
                f"FC643 {who}: found {name}={shown!r}, for which it is not built; expected "
                f"{' or '.join(map(repr, works))}. Stages draw one Poisson batch together, and "
                "clip it by one norm over all of them."
            )
