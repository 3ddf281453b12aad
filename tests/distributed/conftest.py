"""The processes of this folder's tests, which are started once."""

from __future__ import annotations

from tests.distributed import (
    failures,
    test_four_processes,
    test_tensor_parallel,
    test_tensor_parallel_shards,
    test_two_processes,
)
from tests.distributed.processes import BACKEND, ProcessGroup
from tests.support.starting import fixture_of

by_two = fixture_of(ProcessGroup("by_two", world=2, main=test_two_processes.main))
by_four = fixture_of(ProcessGroup("by_four", world=4, main=test_four_processes.main))
tensor_by_two = fixture_of(ProcessGroup("tensor_by_two", world=2, main=test_tensor_parallel.main))
tensor_by_four = fixture_of(
    ProcessGroup("tensor_by_four", world=4, main=test_tensor_parallel_shards.main)
)
#: They mostly wait: beside the others, where GPUs are not what these are short of.
failing = fixture_of(
    ProcessGroup("failing", lane=int(BACKEND == "gloo"), world=2, main=failures.main)
)
