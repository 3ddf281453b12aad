"""Generators for the noise of shards: a process draws for its own shard and for nothing else.

What a shard's noise is drawn from depends on a key that all processes share and on where the shard
is. Processes that hold the same shard draw the same numbers; those of different shards draw
independently. Each parameter's noise is a whole one, of which nobody ever holds more than a shard.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import torch
from torch import distributed as dist

from flash_clipping.sharded.reducer import device_of

#: The key is below this.
_KEYS = 1 << 62


def shared_key(mesh: Any, generator: torch.Generator | None) -> int:
    """A number that all processes of a mesh have in common and none of them chooses alone.

    Args:
        mesh: the processes; each of them has to call this.
        generator: where this process's part comes from; the operating system if ``None``.
    """
    if generator is None:
        own = secrets.randbelow(_KEYS)
    else:
        own = int(torch.randint(_KEYS, (1,), generator=generator, device=generator.device))
    key = torch.tensor([own], device=device_of(mesh))  # int64: the sum is modulo 2^64
    for dim in range(mesh.ndim):
        dist.all_reduce(key, op=dist.ReduceOp.SUM, group=mesh.get_group(dim))
    return int(key)


class ShardGenerators:
    """The generators of one process.

    Args:
        key: from :func:`shared_key`.
    """

    def __init__(self, key: int):
        self._key = key
        self._of: dict[str, torch.Generator] = {}

    def of_shard(self, param: Any) -> torch.Generator:
        """The one for this process's shard of a parameter, and of others that are sharded alike.

        Along dimensions of the mesh that replicate, coordinates do not count.
        """
        place = [
            (dim, coordinate)
            for dim, coordinate in enumerate(param.device_mesh.get_coordinate())
            if param.placements[dim].is_shard()
        ]
        return self._find(f"{tuple(param.placements)} at {place}", param.to_local().device)

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
