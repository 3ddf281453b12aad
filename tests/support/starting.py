"""Processes that tests start: forks of one that has imported everything.

To import PyTorch, Opacus and this library takes a new process seconds.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

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
