"""Who takes part: processes with samples of their own, and processes that share every sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from flash_clipping.distributed.shard_noise import shared_stream
from flash_clipping.randomness import SecretStream


def device_of(mesh: Any) -> torch.device:
    """This process's device of a mesh."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


class ProcessGroups:
    """The processes of a sharded model, as its parameters lie on them.

    Args:
        params: the model's parameters, of a form that was not refused.
        fully_sharded: ``fully_shard`` was applied to the model.

    Attributes:
        mesh: all of them. Keys of noise, and rehearsals, are theirs together.
        data: dimensions of ``mesh`` along which processes have other samples.
        tensor: the mesh of processes that share their samples and have parts of layers each
            (tensor parallelism); ``None`` without.
    """

    def __init__(self, params: Sequence[Any], fully_sharded: bool):
        meshes = [param.device_mesh for param in params if isinstance(param, DTensor)]
        self.mesh: Any = max(meshes, key=lambda mesh: mesh.ndim)
        self.data: tuple[int, ...] = tuple(range(self.mesh.ndim))
        self.tensor: Any = None
        widest = [p for p in params if isinstance(p, DTensor) and p.device_mesh == self.mesh]
        if not fully_sharded:
            self.data, self.tensor = (), self.mesh
        elif any(is_tensor_parallel(param.placements) for param in widest):
            names: Any = self.mesh.mesh_dim_names
            self.data, self.tensor = (0,), self.mesh[names[1]]

    @property
    def data_rank(self) -> int:
        """This process's number among those with other samples."""
        rank = 0
        for dim in self.data:
            rank = rank * self.mesh.size(dim) + self.mesh.get_local_rank(dim)
        return rank

    @property
    def data_size(self) -> int:
        """How many parts a batch has."""
        size = 1
        for dim in self.data:
            size *= self.mesh.size(dim)
        return size

    def cut(self, param: Any) -> bool:
        """Whether a parameter, as it lies between steps, is laid out over the tensor mesh."""
        return self.tensor is not None and getattr(param, "device_mesh", None) == self.mesh

    def shared_stream(self, own: SecretStream) -> SecretStream:
        """A stream whose key all processes have in common (:func:`shared_stream`)."""
        groups = [self.mesh.get_group(dim) for dim in range(self.mesh.ndim)]
        return shared_stream(groups, device_of(self.mesh), own)

    def reduce(self, x: Tensor, op: Any = None, samples: bool = False) -> Tensor:
        """``x`` of all processes together, in place; ``samples``: only of those with other samples,
        as what is counted of samples is."""
        for dim in self.data if samples else range(self.mesh.ndim):
            dist.all_reduce(x, op=op or dist.ReduceOp.SUM, group=self.mesh.get_group(dim))
        return x


def is_tensor_parallel(placements: Any) -> bool:
    """Whether these, of a parameter that ``fully_shard`` manages, are over (data, tensor).

    ``fully_shard`` cuts along the first dimension then; in its hybrid form that one replicates.
    """
    return len(placements) == 2 and not placements[0].is_replicate()
