"""The noise of shards: a process draws for its own shards and for nothing else.

All processes have one key, and words are addressed by tensor and shard. Processes that hold the
same shard draw the same; those of different shards draw from different nonces. Each parameter's
noise is a whole one, of which nobody ever holds more than a shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

from flash_clipping.randomness import Purpose, SecretStream
from flash_clipping.randomness.chacha20 import words
from flash_clipping.randomness.stream import KEY_BYTES
from flash_clipping.sharded.reducer import device_of


def shared_stream(mesh: Any, own: SecretStream) -> SecretStream:
    """A stream whose key all processes of a mesh have in common and none of them chooses alone.

    Every process contributes 32 bytes. Those along a dimension of the mesh are hashed together in
    the order of its coordinates, one dimension after the other.

    Args:
        mesh: the processes; each of them has to call this.
        own: where this process's bytes come from. If it is seeded, so is the result, and all
            processes need the same seed to draw the same in another run.
    """
    part = words(own.draw(Purpose.KEY), 1).view(torch.uint8).flatten()[:KEY_BYTES]
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        mine = part.to(device_of(mesh))
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        text = b"flash_clipping key of processes" + torch.cat(parts).cpu().numpy().tobytes()
        part = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8)
    stream = SecretStream(key=part.numpy().tobytes())
    stream.seed = own.seed
    return stream


def shard_number(placements: Sequence[Any], sizes: Sequence[int], place: Sequence[int]) -> int:
    """Which shard of a parameter a process holds, among all of them.

    Along dimensions of the mesh that do not shard the parameter, coordinates do not count: what is
    the same tensor gets the same noise.

    Args:
        placements: of the parameter, one for each dimension of the mesh.
        sizes: of the mesh.
        place: the process's coordinates in it.
    """
    number = 0
    for placement, size, coordinate in zip(placements, sizes, place, strict=True):
        if placement.is_shard():
            number = number * size + coordinate
    return number


def shard_of(param: Any) -> int:
    """:func:`shard_number` of this process, for a ``DTensor``."""
    mesh = param.device_mesh
    return shard_number(param.placements, mesh.shape, mesh.get_coordinate())
