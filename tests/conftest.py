"""Settings that every test needs before the first kernel is imported."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated: kernels then run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")


# The models are tiny: handing work to threads takes longer than doing it, and workers share cores.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def small_inputs_are_handed_on() -> None:
    """Models of the tests are too small for what would otherwise go untested."""
    from flash_clipping.capture import tap

    tap.WORTH_HANDING_ON.update({False: 0, True: 0})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
