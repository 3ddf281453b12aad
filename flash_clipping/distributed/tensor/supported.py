"""Which forms of tensor parallelism are served; the others are refused by name."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from flash_clipping.distributed.process_groups import is_tensor_parallel

_WORKS = (
    "What works: parallelize_module over a mesh of one dimension; or that over mesh['tp'] of a "
    "mesh with the dimensions (data, tensor), and then fully_shard over mesh['dp'] on blocks and "
    "on the model itself; before the model is wrapped and before its optimizer is made."
)


def is_tensor_parallelized(root: nn.Module) -> bool:
    """Whether a parameter is cut over a mesh that ``fully_shard`` has not made it."""
    params = [param for param in root.parameters() if isinstance(param, DTensor)]
    if not isinstance(root, FSDPModule):
        # Below ``fully_shard`` on parts of a model, which is refused as what it is, none is told.
        parts = any(isinstance(module, FSDPModule) for module in root.modules())
        return bool(params) and not parts
    return any(
        param.device_mesh.ndim > 2 or is_tensor_parallel(param.placements) for param in params
    )


def refuse_tensor_parallel(root: nn.Module) -> None:
    """Refuse a model with layers over a tensor mesh that cannot be served.

    Raises:
        NotImplementedError: meshes of more dimensions, several of them, an empty shard, or a
            parameter that is a sum over processes.
    """
    fully_sharded = isinstance(root, FSDPModule)
    dims = 2 if fully_sharded else 1
    meshes: dict[str, Any] = {}
    for name, param in root.named_parameters():
        if not isinstance(param, DTensor):
            continue
        mesh, placements = param.device_mesh, tuple(param.placements)
        if mesh.ndim > dims:
            raise NotImplementedError(
                f"{name}: found a DTensor over a mesh of {mesh.ndim} dimensions "
                f"({mesh.mesh_dim_names}), with placements {placements}. Replicas beside "
                f"(data, tensor), and other forms of several dimensions, are not built. {_WORKS}"
            )
        if any(placement.is_partial() for placement in placements):
            raise NotImplementedError(
                f"{name}: found a DTensor that is a sum over processes ({placements}). {_WORKS}"
            )
        if mesh.ndim == dims:
            meshes[name] = mesh
            _refuse_empty(name, param)
    (first, mesh), *others = meshes.items()
    for name, other in others:
        if other != mesh:
            raise NotImplementedError(
                f"{name}: found a DTensor over {other}, and {first} over {mesh}. Lay the model "
                f"out over one mesh. {_WORKS}"
            )
    if not fully_sharded:
        return
    data = mesh[mesh.mesh_dim_names[0]]
    for name, param in root.named_parameters():
        if isinstance(param, DTensor) and param.device_mesh not in (mesh, data):
            raise NotImplementedError(
                f"{name}: found a DTensor over {param.device_mesh}; expected {mesh}, or its first "
                f"dimension. {_WORKS}"
            )


def _refuse_empty(name: str, param: Any) -> None:
    placement, ranks = param.placements[-1], param.device_mesh.size(-1)
    if not placement.is_shard():
        return
    size = param.shape[placement.dim]
    each = -(-size // ranks)
    if each * (ranks - 1) >= size:
        raise NotImplementedError(
            f"{name}: found {size} rows or columns cut into {ranks} parts, some of them empty. "
            "Use fewer processes, or leave this layer whole."
        )
