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


def shared_stream(groups: Sequence[Any], device: torch.device, own: SecretStream) -> SecretStream:
    """A stream whose key all processes have in common and none of them chooses alone.

    Every process contributes 32 bytes. Those of a group are hashed together in the order of its
    ranks, one group after the other.

    Args:
        groups: this process's, which together reach all processes (those of a mesh, one for each
            dimension). Every process has to call this.
        device: of this process, for what it sends.
        own: where this process's bytes come from. If it is seeded, so is the result, and all
            processes need the same seed to draw the same in another run.
    """
    part = words(own.draw(Purpose.KEY), 1).view(torch.uint8).flatten()[:KEY_BYTES]
    for group in groups:
        mine = part.to(device)
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

    Args:
        placements: of the parameter, one for each dimension of the mesh.
        sizes: of the mesh.
        place: the process's coordinates in it.
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
