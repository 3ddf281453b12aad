"""Which forms of sharding are served; the others are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import distributed as dist
from torch import nn

from flash_clipping._compat import applied_to
from flash_clipping.capture.session import ClippingSession

if TYPE_CHECKING:
    from flash_clipping.sharded.model import ShardedModel

_WORKS = (
    "What works: torch.distributed.fsdp.fully_shard on blocks and on the model itself, over a mesh "
    "of one dimension, or of two (replicate, shard), before the model is wrapped and before its "
    "optimizer is made."
)


def is_sharded(module: Any) -> bool:
    """Whether ``fully_shard`` was applied to this module; not ``replicate``, made of it."""
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        return False
    plain: Any = module  # a mixin, not a module
    return "replicate" not in applied_to(plain)


def sharded_model(root: nn.Module, session: ClippingSession) -> ShardedModel | None:
    """What a model has besides that ``fully_shard`` was applied to; ``None`` for any other.

    Raises:
        NotImplementedError: ``sample_of``.
    """
    if not is_sharded(root):
        return None
    from flash_clipping.sharded.model import ShardedModel

    return ShardedModel(root, session)


def refuse_sharding(root: nn.Module) -> None:
    """Refuse a model with shards that cannot be served.

    Raises:
        NotImplementedError: ``fully_shard`` was applied to parts only, or left trainable
            parameters out; or some are sharded in another way (tensor parallelism, a device mesh of
            other dimensions).
    """
    if not dist.is_available():
        return
    from torch.distributed.tensor import DTensor

    parts = [path for path, module in root.named_modules() if is_sharded(module)]
    if parts and parts[0]:
        raise NotImplementedError(
            f"{parts[0]}: found fully_shard on parts of the model, and not on the model "
            f"({type(root).__name__}) itself. Call fully_shard(model) last. {_WORKS}"
        )
    meshes = []
    for name, param in root.named_parameters():
        if not isinstance(param, DTensor):
            if parts and param.requires_grad:
                raise NotImplementedError(
                    f"{name}: found a trainable parameter that fully_shard does not manage "
                    "(ignored_params, or a parameter that came later): nothing would reduce its "
                    f"clipped sums. Freeze it, or let fully_shard manage it. {_WORKS}"
                )
            continue
        if not parts or not _is_data_parallel(param.placements):
            raise NotImplementedError(
                f"{name}: found a DTensor with placements {param.placements}, as tensor "
                "parallelism (parallelize_module) makes them. Processes that share a sample would "
                f"have to add up its norms, which is not built. {_WORKS}"
            )
        meshes.append(param.device_mesh)
    for mesh in meshes:
        if mesh != meshes[0]:
            raise NotImplementedError(
                f"the model: found parameters on several device meshes ({meshes[0]} and {mesh}). "
                f"Shard all of it over one. {_WORKS}"
            )


def _is_data_parallel(placements: Any) -> bool:
    if len(placements) == 1:
        return bool(placements[0].is_shard())
    return len(placements) == 2 and placements[0].is_replicate() and placements[1].is_shard()
