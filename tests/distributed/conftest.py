"""The processes of this folder's tests, which are started once."""

from __future__ import annotations

import pytest

from tests.distributed import failures, processes, test_four_processes, test_two_processes
from tests.distributed.processes import Found


@pytest.fixture(scope="session")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of two processes has found."""
    name, main = "sharded_by_two", test_two_processes.main
    return processes.run(tmp_path_factory, name, 2, main, beside=failures.main)


@pytest.fixture(scope="session")
def by_four(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """The same of four."""
    return processes.run(tmp_path_factory, "sharded_by_four", 4, test_four_processes.main)
