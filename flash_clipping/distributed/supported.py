"""Which forms of sharding are served; the others are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import distributed as dist, nn

from flash_clipping._compat import applied_to
from flash_clipping.capture.session import ClippingSession

if TYPE_CHECKING:
    from flash_clipping.distributed.model import ShardedModel
    from flash_clipping.distributed.process_groups import ProcessGroups

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


def has_shards(module: Any) -> bool:
    """Whether parameters are shards: ``fully_shard`` or ``parallelize_module`` was applied."""
    return is_sharded(module) or is_tensor_parallel(module)


def is_tensor_parallel(module: Any) -> bool:
    """Whether layers are cut over processes, as ``parallelize_module`` does."""
    if not dist.is_available() or not isinstance(module, nn.Module):
        return False
    if not any(hasattr(param, "placements") for param in module.parameters()):
        return False
    from flash_clipping.distributed.tensor.supported import is_tensor_parallelized

    return is_tensor_parallelized(module)


def processes_of(module: Any) -> ProcessGroups | None:
    """The processes of a model whose parameters are shards; ``None`` for any other."""
    if not has_shards(module):
        return None
    from flash_clipping.distributed.process_groups import ProcessGroups

    return ProcessGroups([*module.parameters()], is_sharded(module))


def sharded_model(root: nn.Module, session: ClippingSession) -> ShardedModel | None:
    """What a model has besides whose parameters are shards; ``None`` for any other.

    Raises:
        NotImplementedError: ``sample_of``.
    """
    if not has_shards(root):
        return None
    from flash_clipping.distributed.model import ShardedModel

    return ShardedModel(root, session)


def refuse_sharding(root: nn.Module) -> None:
    """Refuse a model with shards that cannot be served.

    Raises:
        NotImplementedError: ``fully_shard`` was applied to parts only, or left trainable
            parameters out; or they lie over several meshes, or one of other dimensions.
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
    tensor_parallel = is_tensor_parallel(root)
    if tensor_parallel:
        from flash_clipping.distributed.tensor.supported import refuse_tensor_parallel

        refuse_tensor_parallel(root)
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
        if not tensor_parallel:
            meshes.append(param.device_mesh)
    for mesh in meshes:
        if mesh != meshes[0]:
            raise NotImplementedError(
                f"the model: found parameters on several device meshes ({meshes[0]} and {mesh}). "
                f"Shard all of it over one. {_WORKS}"
            )
