"""Settings that every test needs before the first kernel is imported."""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.dynamo import measure_no_guards
from tests.support.interpreter import remember_the_language
from tests.support.pairs import leave_other_combinations_to_slow
from tests.support.starting import asks_for_processes, begin_all, end_all

HERE = Path(__file__).parent

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated: kernels then run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")


# Models, traces and syntax trees are many objects: to look for cycles after every 700 takes a tenth
# of all time. Tests of what is let go of collect themselves.
gc.set_threshold(20_000, 20, 20)

# The models are tiny: handing work to threads takes longer than doing it, and workers share cores.
torch.set_num_threads(1)


def _remember_accounts() -> None:
    """Accountants try the same noise, for the same rates, in many tests and twice in each: seconds
    every time, of a function of a few numbers."""
    # Not above: with some versions Opacus imports Triton.
    from opacus.accountants import PRVAccountant
    from opacus.accountants.analysis import rdp

    if hasattr(rdp, "_compute_log_a"):
        rdp._compute_log_a = functools.cache(rdp._compute_log_a)
    of_history, known = PRVAccountant.get_epsilon, {}

    @functools.wraps(of_history)
    def get_epsilon(self: PRVAccountant, *args: float, **kwargs: float) -> float:
        key = repr((type(self), self.history, args, sorted(kwargs.items())))
        if key not in known:
            known[key] = of_history(self, *args, **kwargs)
        return known[key]

    PRVAccountant.get_epsilon = get_epsilon


def _seed_only_what_there_is() -> None:
    """``torch.manual_seed`` notes the seed, with the whole stack as text, for every kind of device
    that is not there yet: a millisecond every time under pytest, and a list that grows."""
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


_seed_only_what_there_is()
remember_the_language()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        _remember_accounts()  # workers wait for the process that starts them, which runs no test


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    """Kinds of the survey, and Opacus' tests, set one."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def _compared_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No comparison of single samples with autograd before first steps, in files whose tests make
    one of their own (``without_gate``): it is a fifth of such a test's time."""
    if request.node.get_closest_marker("without_gate"):
        comparison = "flash_clipping.capture.proof.gate.Gate.examine"
        monkeypatch.setattr(comparison, lambda *_: None)


@pytest.fixture(autouse=True)
def _keys_by_name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of a test get keys by its name, so that its batches are the same in every run.

    What is said of keys themselves is tested with real ones.
    """
    from flash_clipping.randomness import stream

    if request.path.parent.name == "randomness":
        return
    numbers = itertools.count()

    def token_bytes(count: int) -> bytes:
        name = f"{request.node.nodeid} {next(numbers)}"
        return hashlib.sha256(name.encode()).digest()[:count]

    monkeypatch.setattr(stream, "secrets", SimpleNamespace(token_bytes=token_bytes))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_other_combinations_to_slow(items)
    if not torch.cuda.is_available():
        # Thousands, of which each would be reported as skipped.
        config.hook.pytest_deselected(items=[item for item in items if "gpu" in item.keywords])
        items[:] = [item for item in items if "gpu" not in item.keywords]
    # Files that lie here have the longest tests: a worker that began one last would be waited for.
    # What processes find that are begun now is asked for at the end.
    items.sort(key=lambda item: (asks_for_processes(item), item.path.parent != HERE))


def pytest_collection_finish(session: pytest.Session) -> None:
    keep_what_is_imported()
    if not session.config.option.collectonly:
        begin_all(session.items, session.config._tmp_path_factory)  # type: ignore[attr-defined]


def pytest_runtest_teardown() -> None:
    keep_what_is_imported()


_modules = 0


def keep_what_is_imported() -> None:
    """What was imported and collected stays: collections, which tests and benchmarks ask for, need
    not walk through it every time. Tests import more: Dynamo, or transformers."""
    global _modules
    if len(sys.modules) > _modules + 50:
        _modules = len(sys.modules)
        measure_no_guards()
        gc.collect()
        gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    is_whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    end_all(wait=is_whole and not (session.shouldstop or session.shouldfail))
    gc.freeze()  # pytest would look through everything five times
