"""The processes of a step: those with samples of their own, and those that share every sample.

All processes have one key of noise, and words are addressed by tensor and shard. Processes that
hold the same shard draw the same; those of different shards draw from different nonces.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed as dist

from flash_clipping.randomness import Purpose, SecretStream
from flash_clipping.randomness.chacha import words
from flash_clipping.randomness.stream import KEY_BYTES


def shared_stream(groups: Sequence[Any], own: SecretStream) -> SecretStream:
    """A stream whose key all processes have in common and none of them chooses alone. All call it.

    Every process contributes 32 bytes. Those of a group are hashed together in the order of its
    ranks, one group after the other.

    Args:
        groups: this process's, which together reach all processes (those of a mesh, one for each
            dimension).
        own: where this process's bytes come from. If it is seeded, so is the result, and all
            processes need the same seed to draw the same in another run.
    """
    part = words(own.draw(Purpose.KEY), 1).view(torch.uint8).flatten()[:KEY_BYTES]
    for group in groups:
        on_gpus = "nccl" in dist.get_backend(group)
        mine = part.to("cuda" if on_gpus else "cpu")
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        text = b"flash_clipping key of processes" + torch.cat(parts).cpu().numpy().tobytes()
        part = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8)
    stream = SecretStream(key=part.numpy().tobytes())
    stream.seed = own.seed
    return stream


def shard_number(placements: Sequence[Any], sizes: Sequence[int], place: Sequence[int]) -> int:
    """Which shard of a parameter a process holds, among all of them.

    Along dimensions of the mesh that replicate the parameter, coordinates do not count: what is the
    same tensor gets the same noise.
    """
    number = 0
    for placement, size, coordinate in zip(placements, sizes, place, strict=True):
        # Not is_shard(): a _StridedShard, of two meshes at once, says that it is none.
        if not placement.is_replicate():
            number = number * size + coordinate
    return number


def shard_of(param: Any) -> int:
    """:func:`shard_number` of this process; 0 for what is no ``DTensor``, which all have."""
    if not hasattr(param, "placements"):
        return 0
    mesh = param.device_mesh
    return shard_number(param.placements, mesh.shape, mesh.get_coordinate())


def device_of(mesh: dist.DeviceMesh) -> torch.device:
    """This process's device of a mesh."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


class ProcessGroups:
    """The processes of a sharded model, as its parameters lie on them.

    Attributes:
        mesh: all of them. Keys of noise, and rehearsals, are theirs together.
        data: dimensions of ``mesh`` along which processes have other samples.
        tensor: the mesh of processes that share their samples and have parts of layers each
            (tensor parallelism); ``None`` without.
    """

    def __init__(self, params: Sequence[Any], fully_sharded: bool):
        shards = [param for param in params if hasattr(param, "placements")]
        self.mesh: Any = max((param.device_mesh for param in shards), key=lambda mesh: mesh.ndim)
        self.data: tuple[int, ...] = tuple(range(self.mesh.ndim))
        self.tensor: Any = None
        widest = [param for param in shards if param.device_mesh == self.mesh]
        if not fully_sharded:
            self.data, self.tensor = (), self.mesh
        elif any(is_over_data_and_tensor(param.placements) for param in widest):
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
        return math.prod(self.mesh.size(dim) for dim in self.data)

    def shared_stream(self, own: SecretStream) -> SecretStream:
        """A stream whose key all processes have in common."""
        return shared_stream([self.mesh.get_group(dim) for dim in range(self.mesh.ndim)], own)

    def reduce(self, x: Tensor, op: Any = None, samples: bool = False) -> Tensor:
        """``x`` of all processes together, in place; ``samples``: only of those with other samples,
        as what is counted of samples is."""
        for dim in self.data if samples else range(self.mesh.ndim):
            dist.all_reduce(x, op=op or dist.ReduceOp.SUM, group=self.mesh.get_group(dim))
        return x


def is_over_data_and_tensor(placements: Any) -> bool:
    """Whether these, of a parameter that ``fully_shard`` manages, are over (data, tensor): it cuts
    along the first dimension then; in its hybrid form that one replicates."""
    return len(placements) == 2 and not placements[0].is_replicate()
