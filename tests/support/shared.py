"""What one worker prepares for all of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest


def filled_once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]) -> Path:
    """A folder that ``fill`` has written into; the other workers of the run wait for it.

    For what starts processes of its own, which use the cores of those who wait.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = factory.mktemp(name)
        fill(folder)
        return folder
    # The parent of a worker's folder is the run's.
    folder = factory.getbasetemp().parent / name
    done, failed = folder.with_suffix(".done"), folder.with_suffix(".failed")
    try:
        folder.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + 240
        while not done.exists():
            assert not failed.exists(), f"another worker could not prepare {name}: see its error"
            assert time.monotonic() < deadline, f"another worker did not prepare {name} in time"
            time.sleep(0.1)
        return folder
    try:
        fill(folder)
    except BaseException:
        failed.touch()
        raise
    done.touch()
    return folder
