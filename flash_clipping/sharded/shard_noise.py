"""Generators for the noise of shards: a process draws for its own shard and for nothing else.

What a shard's noise is drawn from depends on a key that all processes share and on where the shard
is. Processes that hold the same shard draw the same numbers; those of different shards draw
independently. Each parameter's noise is a whole one, of which nobody ever holds more than a shard.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flash_clipping.sharded.tensor.local import local_of


class ShardGenerators:
    """The generators of one process.

    Args:
        key: a number that all processes have in common and none of them chooses alone
            (:meth:`Processes.shared_number`).
    """

    def __init__(self, key: int):
        self._key = key
        self._of: dict[str, torch.Generator] = {}

    def of_shard(self, param: Any) -> torch.Generator:
        """The one for this process's shard of a parameter, and of others that are sharded alike.

        Along dimensions of the mesh that replicate, coordinates do not count. All processes have
        what is no ``DTensor``.
        """
        if not isinstance(param, DTensor):
            return self._find("whole", param.device)
        # Not is_shard(): a _StridedShard, of two meshes at once, says that it is none.
        mesh: Any = param.device_mesh
        place = [
            (dim, coordinate)
            for dim, coordinate in enumerate(mesh.get_coordinate())
            if not param.placements[dim].is_replicate()
        ]
        name = f"{mesh.mesh_dim_names} {tuple(param.placements)} at {place}"
        return self._find(name, local_of(param).device)

    def of_all(self) -> torch.Generator:
        """One that is the same in all processes, on the CPU."""
        return self._find("all", torch.device("cpu"))

    def _find(self, name: str, device: torch.device) -> torch.Generator:
        name = f"{self._key} {name} {device.type}"
        if name not in self._of:
            digest = hashlib.sha256(name.encode()).digest()
            generator = torch.Generator(device=device)
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            self._of[name] = generator
        return self._of[name]
