"""Settings that every test needs before the first kernel is imported."""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

HERE = Path(__file__).parent

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated: kernels then run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")


# The models are tiny: handing work to threads takes longer than doing it, and workers share cores.
torch.set_num_threads(1)


def _remember_accounts() -> None:
    """Accountants try the same noise, for the same rates, in many tests and twice in each: seconds
    every time, of a function of three numbers."""
    # Not above: with some versions Opacus imports Triton.
    from opacus.accountants.analysis import rdp

    if hasattr(rdp, "_compute_log_a"):
        rdp._compute_log_a = functools.cache(rdp._compute_log_a)


_remember_accounts()


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files that lie here have the longest tests: a worker that began one last would be waited for.
    items.sort(key=lambda item: item.path.parent != HERE)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """All that was imported and collected stays: collections, which tests and benchmarks ask for,
    need not walk through it every time."""
    gc.collect()
    gc.freeze()
