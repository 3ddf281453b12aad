"""Processes that tests start: forks of one that has imported everything.

To import PyTorch, Opacus and this library takes a new process seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed as dist

from tests.support.shared import filled_once

#: What such processes have imported.
IMPORTED = ["tests.distributed.imported"]


def start_processes(
    function: Callable[..., Any], args: tuple[Any, ...], count: int, *, fork: bool
) -> None:
    """Run ``function(rank, *args)`` in so many processes, and wait for them.

    Args:
        fork: whether they may be forks; where GPUs are used they may not.

    Raises:
        torch.multiprocessing.ProcessException: one failed.
    """
    method = "spawn"
    if fork and "forkserver" in multiprocessing.get_all_start_methods():
        method = "forkserver"
        multiprocessing.set_forkserver_preload(IMPORTED)
    mp.start_processes(function, args=args, nprocs=count, start_method=method)


def found_by_gloo(
    factory: pytest.TempPathFactory, name: str, find: Callable[[int], dict[str, Any]], world: int
) -> list[dict[str, Any]]:
    """What ``find(rank)`` returns in each of ``world`` processes, which talk by gloo over the
    loopback interface and are started once in a run, by this ``name``."""
    folder = filled_once(
        factory,
        name,
        lambda folder: start_processes(_find, (find, str(folder), world), world, fork=True),
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def _find(rank: int, find: Callable[[int], dict[str, Any]], folder: str, world: int) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world)
    try:
        torch.save(find(rank), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()
