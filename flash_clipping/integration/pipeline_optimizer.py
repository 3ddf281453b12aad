"""The optimizer of a stage in a pipeline, and what ``make_private(pipeline=...)`` is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from flash_clipping.integration.optimizer import FlashDPOptimizer
from flash_clipping.pipeline.noise import StageGenerators
from flash_clipping.sharded import is_sharded


class PipelineFlashDPOptimizer(FlashDPOptimizer):
    """:class:`~flash_clipping.FlashDPOptimizer` for one stage's parameters.

    Every process adds noise to the parameters of its stage, by the bound of the whole model's
    norms: together that is one draw for every element, as in one process. Noise of different stages
    is independent, however processes are seeded. All processes make their optimizers together.

    Args:
        optimizer: of the stage's parameters.
        group: the processes of the pipeline; all processes if ``None``.
        generator: where this process's part of the shared key comes from; the operating system if
            ``None``.
        **kwargs: as in :class:`~flash_clipping.FlashDPOptimizer`.

    Raises:
        NotImplementedError: ``secure_mode``.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        group: Any = None,
        secure_mode: bool = False,
        generator: Any = None,
        **kwargs: Any,
    ):
        if secure_mode:
            raise NotImplementedError(
                "secure_mode=True: found a stage of a pipeline. All stages draw the same batches, "
                "from a generator that they share, which a secure generator does not allow. Use "
                "secure_mode=False, or one process."
            )
        super().__init__(optimizer, secure_mode=False, generator=None, **kwargs)
        self._group = dist.group.WORLD if group is None else group
        made = StageGenerators(self._group, generator)
        self.generator = made.of_stage(self.params[0].device)
        self._of_all = made.of_all("count")

    def _noisy_count(self, count: Tensor, std: float) -> Tensor:
        """All stages have counted the same samples, and draw the same noise; the first one's
        number holds for all."""
        noise = torch.normal(0.0, std, (1,), generator=self._of_all, dtype=torch.float64)
        noisy = count + noise.to(count.device).squeeze(0)
        dist.broadcast(noisy, group=self._group, group_src=0)
        return noisy


def pipeline_group(pipeline: Any, settings: dict[str, Any]) -> Any:
    """The processes of the pipeline that ``make_private(pipeline=...)`` names; ``None`` for none.

    Args:
        pipeline: ``True`` for all processes, or a process group.
        settings: the other arguments of ``make_private``, and the engine's ``secure_mode``.

    Raises:
        ValueError: ``torch.distributed`` does not run.
        NotImplementedError: what is not built for pipelines.
    """
    if pipeline is None or pipeline is False:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "pipeline: torch.distributed is not initialised. Start the stages' processes with "
            "torchrun, and call torch.distributed.init_process_group first."
        )
    served: dict[str, tuple[Any, ...]] = {
        "mode": ("one_pass",),
        "clipping": ("flat", "automatic", "adaptive"),
        "poisson_sampling": (True,),
        "distributed": (None,),
        "units": (None,),
        "sample_of": (None,),
        "secure_mode": (False,),
    }
    if is_sharded(settings.get("module")):
        raise NotImplementedError(
            "pipeline: found a stage that fully_shard was applied to, for which it is not built. "
            "Leave fully_shard out, or shard the whole model without a pipeline."
        )
    for name, works in served.items():
        value = settings.get(name, works[0])
        if not any(value is one or (isinstance(one, str) and value == one) for one in works):
            shown = value if isinstance(value, str | bool) else "..."
            raise NotImplementedError(
                f"pipeline: found {name}={shown!r}, for which it is not built; expected "
                f"{' or '.join(map(repr, works))}. Stages draw one Poisson batch together, and "
                "clip it by one norm over all of them."
            )
    return dist.group.WORLD if pipeline is True else pipeline
