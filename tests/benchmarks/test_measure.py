"""Peak memory is counted to the byte."""

from __future__ import annotations

import pytest
import torch

from benchmarks.measure import PeakMemory

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MiB = 2**20


def mebibytes(number: int, device: str) -> torch.Tensor:
    return torch.empty(number * MiB, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_peak_counts_what_was_held_and_what_was_let_go(device: str) -> None:
    beside = mebibytes(64, device)
    with PeakMemory(torch.device(device)) as memory:
        kept = mebibytes(8, device)
        gone = mebibytes(32, device)
        del gone
        with memory.measured():
            temporary = mebibytes(4, device)
            del temporary
            other = mebibytes(2, device)
    assert memory.peak == 12 * MiB  # neither `beside`, nor `gone`, nor `other` on top
    del kept, other, beside


@pytest.mark.parametrize("device", DEVICES)
def test_peak_sees_temporaries_inside_operators(device: str) -> None:
    """A sum over a transposed fp16 tensor cast to fp32 holds the cast copy for a moment."""
    with PeakMemory(torch.device(device)) as memory:
        values = torch.ones(MiB, dtype=torch.float32, device=device)
        with memory.measured():
            (values * values).exp_().sum()
    assert memory.peak >= 8 * MiB
