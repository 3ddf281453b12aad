"""Processes that tests start, in groups that are begun when a run begins, beside its first tests.

To import PyTorch, Opacus and this library takes a new process seconds, and processes that wait for
each other leave a core to others. So one process imports everything and forks all of them
(``tests/support/forking.py``), and tests that ask for what they have found come last.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed as dist

ROOT = Path(__file__).parents[2]
#: Seconds that a test waits for processes that have been begun.
PATIENCE = 280


@dataclass(frozen=True)
class Group(ABC):
    """Processes that are started once in a run, by this name.

    Attributes:
        name: also of the fixture, and of the folder that they write into.
        lane: groups of one lane run one after the other.
    """

    name: str
    lane: int = 0

    @abstractmethod
    def fill(self, folder: Path) -> None:
        """Start them, and wait until they have written what they found."""

    @abstractmethod
    def read(self, folder: Path) -> list[Any]:
        """What each of them has found."""

    def found(self, factory: pytest.TempPathFactory) -> list[Any]:
        """The same, which another worker may have begun."""
        folder = folder_of_run(factory) / self.name
        begun = begin([self], folder.parent)
        done, failed = folder.with_suffix(".done"), folder.with_suffix(".failed")
        deadline = time.monotonic() + PATIENCE
        while not done.exists():
            assert not failed.exists(), f"{self.name}: {failed.read_text()}"
            assert begun is None or begun.poll() is None or done.exists(), f"{self.name} has ended"
            assert time.monotonic() < deadline, f"{self.name} has not ended in time"
            time.sleep(0.1)
        return self.read(folder)


#: By the names of their fixtures.
GROUPS: dict[str, Group] = {}
_begun: list[subprocess.Popen[bytes]] = []


def fixture_of(group: Group) -> Any:
    """What these processes have found, for all tests of a run."""

    @pytest.fixture(scope="session", name=group.name)
    def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
        return group.found(tmp_path_factory)

    GROUPS[group.name] = group
    return found


def _names_of(item: pytest.Item) -> set[str]:
    """Of the groups that it asks for, by a fixture or by what a parameter calls its ``group``."""
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec else ()
    named = {getattr(value, "group", None) for value in values}
    return GROUPS.keys() & {*getattr(item, "fixturenames", ()), *named}


def asks_for_processes(item: pytest.Item) -> bool:
    return bool(_names_of(item))


def folder_of_run(factory: pytest.TempPathFactory) -> Path:
    """The parent of a worker's folder is the run's."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def begin_all(items: Iterable[pytest.Item], factory: pytest.TempPathFactory) -> None:
    """Begin what these tests ask for, in the first worker."""
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        names = {name for item in items for name in _names_of(item)}
        begin([group for group in GROUPS.values() if group.name in names], folder_of_run(factory))


def begin(groups: Iterable[Group], folder: Path) -> subprocess.Popen[bytes] | None:
    """Begin those of these groups that nobody has begun."""
    lanes: dict[int, list[Group]] = {}
    for group in groups:
        try:
            (folder / group.name).mkdir()
        except FileExistsError:
            continue
        lanes.setdefault(group.lane, []).append(group)
    if not lanes:
        return None
    command = [sys.executable, "-m", "tests.support.forking", str(folder)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1" * sys.dont_write_bytecode}
    with (folder / f"{lanes[min(lanes)][0].name}.printed").open("w") as printed:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps([*lanes.values()]))
    process.stdin.close()
    _begun.append(process)
    return process


def end_all(wait: bool) -> None:
    """``wait``: another worker may ask for what they find."""
    for process in _begun:
        if wait:
            process.wait(PATIENCE)
        elif process.poll() is None and hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)


def start_processes(
    function: Callable[..., Any], args: tuple[Any, ...], count: int, *, fork: bool
) -> None:
    """Run ``function(rank, *args)`` in so many processes, and wait for them.

    Args:
        fork: whether they may be forks; where GPUs are used they may not.

    Raises:
        torch.multiprocessing.ProcessException: one failed.
    """
    method = "fork" if fork and hasattr(os, "fork") else "spawn"
    mp.start_processes(function, args=args, nprocs=count, start_method=method)


@dataclass(frozen=True, kw_only=True)
class ByGloo(Group):
    """``find(rank)`` in each of ``world`` processes, which talk by gloo over the loopback
    interface."""

    find: Callable[[int], dict[str, Any]]
    world: int

    def fill(self, folder: Path) -> None:
        start_processes(_find, (self.find, str(folder), self.world), self.world, fork=True)

    def read(self, folder: Path) -> list[Any]:
        return [torch.load(folder / f"{rank}.pt") for rank in range(self.world)]


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
