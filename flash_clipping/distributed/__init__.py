"""Models whose parameters are shards: PyTorch's ``fully_shard`` (FSDP2), its hybrid form (HSDP),
experts in parallel, and ``parallelize_module`` (tensor parallelism), alone or below
``fully_shard``. Here: which forms are supported; the others raise an error.

A parameter is a *slot*: the module that has it, and its name there. Two tensors take turns in it.
Between steps that is a shard, a ``DTensor``: there the sum goes, and the optimizer reads it. While
the module runs it is the whole, unsharded parameter: that is what layers compute with and record.

* ``parameter_slots.py``: the slots of a model, and which tensors were in them;
* ``process_groups.py``: which processes have other samples, and which share them; the key of noise
  that they agree on, and the number of a shard;
* ``backward_pass.py``: one backward pass, whose norms need no other process unless these share
  their samples; ``reducer.py``: its clipped sums, in an order that all share, into the shards;
* ``model.py``: puts these in the place of what an ordinary model has; rehearsals that all
  processes run at the same time; batches without samples;
* ``tensor_parallel.py``: layers that are cut over processes which share their samples;
* ``experts.py``: experts of which each process has its own, and the samples that reach them.

But in tensor parallelism a process has its own samples; their norms and coefficients are its own,
but for what experts in other processes have of them.
Communication follows one rule: every process starts the same operations in the same order, whatever
batch it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import distributed as dist, nn

from flash_clipping._compat import applied_to
from flash_clipping.capture.session import ClippingSession
from flash_clipping.distributed.process_groups import ProcessGroups, is_over_data_and_tensor
from flash_clipping.errors import NotServed

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from flash_clipping.distributed.model import ShardedModel

_WORKS = (
    "What works: torch.distributed.fsdp.fully_shard on blocks and on the model itself, over a mesh "
    "of one dimension, or of two (replicate, shard), before the model is wrapped and before its "
    "optimizer is made."
)
_TENSOR_WORKS = (
    "What works: parallelize_module over a mesh of one dimension; or that over mesh['tp'] of a "
    "mesh with the dimensions (data, tensor), and then fully_shard over mesh['dp'] on blocks and "
    "on the model itself; before the model is wrapped and before its optimizer is made. Leave a "
    "layer whole that has fewer rows than there are processes."
)


def is_sharded(module: Any) -> TypeGuard[FSDPModule]:
    """Whether ``fully_shard`` was applied to this module; not ``replicate``, made of it."""
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule) and "replicate" not in applied_to(module)


def has_shards(module: Any) -> bool:
    """Whether parameters are shards: ``fully_shard`` or ``parallelize_module`` was applied."""
    return is_sharded(module) or _is_tensor_parallel(module)


def _is_tensor_parallel(module: Any) -> bool:
    """Whether layers are cut over processes, as ``parallelize_module`` does: a parameter is cut
    over a mesh that ``fully_shard`` has not made it."""
    if not dist.is_available() or not isinstance(module, nn.Module):
        return False
    shards: list[Any] = [param for param in module.parameters() if hasattr(param, "placements")]
    if not shards:
        return False
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        # Below ``fully_shard`` on parts of a model, which is refused as what it is, none is told.
        return not any(isinstance(part, FSDPModule) for part in module.modules())
    return any(
        param.device_mesh.ndim > 2 or is_over_data_and_tensor(param.placements) for param in shards
    )


def reshard(model: nn.Module) -> None:
    """Let a sharded model, and any other, forget what a forward without a backward has gathered."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()


def processes_of(module: Any) -> ProcessGroups | None:
    """The processes of a model whose parameters are shards; ``None`` for any other."""
    if not has_shards(module):
        return None
    return ProcessGroups([*module.parameters()], is_sharded(module))


def sharded_model(root: nn.Module, session: ClippingSession, mode: str) -> ShardedModel | None:
    """What a model has besides whose parameters are shards; ``None`` for any other."""
    if not has_shards(root):
        return None
    # Not there where PyTorch was built without torch.distributed.
    from flash_clipping.distributed.model import ShardedModel

    return ShardedModel(root, session, mode)


def refuse_sharding(root: nn.Module) -> None:
    """Refuse a model with shards, or with layers over a tensor mesh, that cannot be supported.

    Raises:
        NotImplementedError: ``fully_shard`` was applied to parts only, or left trainable
            parameters out; or they lie over several meshes, or one of other dimensions; or a shard
            is empty, or a parameter a sum over processes.
    """
    if not dist.is_available():
        return
    parts = [path for path, module in root.named_modules() if is_sharded(module)]
    if parts[:1] == ["_orig_mod"]:
        raise NotServed(
            "FC607 the model: found torch.compile around a model that fully_shard was applied to. "
            "Compile it in place:\n"
            "    model.compile()  # in the place of model = torch.compile(model)"
        )
    shards: dict[str, Any] = {
        name: param for name, param in root.named_parameters() if hasattr(param, "placements")
    }
    if is_tensor_parallel := _is_tensor_parallel(root):
        _refuse_tensor_parallel(root, shards, dims=2 if parts else 1)
    meshes = [] if is_tensor_parallel else [param.device_mesh for param in shards.values()]
    others = [mesh for mesh in meshes if mesh != meshes[0]]
    apart = [n for n, param in root.named_parameters() if param.requires_grad and n not in shards]
    found = ""
    if parts and parts[0]:
        found = f"{parts[0]}: found fully_shard on parts, and not on the model itself"
    elif parts and apart:
        found = f"{apart[0]}: found a trainable parameter that fully_shard does not manage"
    elif others:
        found = f"the model: found parameters on several device meshes ({meshes[0]}, {others[0]})"
    if found:
        raise NotServed(f"FC606 {found}. Call fully_shard(model) last, over one mesh. {_WORKS}")


def _refuse_tensor_parallel(root: nn.Module, shards: Mapping[str, Any], dims: int) -> None:
    """The same of layers that are cut over processes; the model's mesh has ``dims`` dimensions."""
    from flash_clipping.distributed.parameter_slots import in_parallel

    for path in in_parallel(root):
        raise NotServed(
            f"FC606 {path}: found experts in parallel in a model that fully_shard was not applied "
            "to over the same mesh, or whose layers are cut over processes as well. Cut experts "
            "alone, and shard all else over their mesh, blocks first:\n"
            "    fully_shard(model, mesh=mesh, ignored_params=distribute_experts(model, mesh))"
        )
    whole: Any = next((p.device_mesh for p in shards.values() if p.device_mesh.ndim == dims), None)
    for name, param in shards.items():
        mesh, placements = param.device_mesh, tuple(param.placements)
        last, ranks, found = placements[-1], mesh.size(-1), ""
        rows = param.shape[last.dim] if last.is_shard() else ranks
        if mesh.ndim > dims:
            found = f"over a mesh of {mesh.ndim} dimensions ({mesh.mesh_dim_names})"
        elif any(placement.is_partial() for placement in placements):
            found = f"that is a sum over processes ({placements})"
        elif mesh.ndim == dims and -(-rows // ranks) * (ranks - 1) >= rows:
            found = f"of {rows} rows or columns, cut into {ranks} parts, some of them empty"
        elif whole and mesh != (whole if mesh.ndim == dims else whole[whole.mesh_dim_names[0]]):
            found = f"over {mesh}, and others over {whole}"
        if found:
            raise NotServed(f"FC621 {name}: found a DTensor {found}. {_TENSOR_WORKS}")
