"""Generators of the stages of a pipeline, from one key that all of them share.

Every stage draws the noise of its own parameters from a generator that no other stage has, however
processes are seeded: with equal seeds their noise would be one and the same. What all stages must
draw alike, batches and the count of adaptive clipping, comes from generators that are equal.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import distributed as dist


class StageGenerators:
    """The generators of one stage's process. All processes of the group make them together.

    Args:
        group: the processes of the pipeline.
        generator: where this process's part of the key comes from; the operating system if
            ``None``.
    """

    def __init__(self, group: Any, generator: torch.Generator | None = None):
        # Imported when first needed: they load half of torch.distributed.
        from torch.distributed.device_mesh import DeviceMesh

        from flash_clipping.sharded.shard_noise import shared_key

        device_type = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
        mesh = DeviceMesh.from_group(group, device_type)
        self._key = shared_key(mesh, generator)
        self._stage = dist.get_rank(group)

    def of_stage(self, device: torch.device) -> torch.Generator:
        """For the noise of this stage's parameters, on their device."""
        return self._make(f"stage {self._stage}", device)

    def of_all(self, purpose: str) -> torch.Generator:
        """The same in all processes, on the CPU."""
        return self._make(f"all: {purpose}", torch.device("cpu"))

    def _make(self, name: str, device: torch.device) -> torch.Generator:
        digest = hashlib.sha256(f"pipeline {self._key} {name}".encode()).digest()
        generator = torch.Generator(device=device)
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return generator
