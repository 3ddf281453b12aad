"""What is remembered of gradients in shards: whether their memory was changed."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from flash_clipping.distributed.parameter_slots import _bits_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 3, 4, 7, 64])
def test_every_change_of_one_element_shows(n: int, dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.zeros(n, dtype=dtype))
    param.grad = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    before, memory = _bits_of([param])
    for i in range(n):
        kept = param.grad[i].clone()
        param.grad[i] = torch.nextafter(kept, kept.new_tensor(torch.inf))
        (found,) = _bits_of([param])[0].values()
        assert found != before[memory[id(param)]]
        param.grad[i] = kept
    (found,) = _bits_of([param])[0].values()
    assert found == before[memory[id(param)]]


def test_parts_of_one_buffer_are_added_up_once() -> None:
    buffer = torch.randn(10)
    params = [nn.Parameter(torch.zeros(5)) for _ in range(2)]
    for param, part in zip(params, buffer.split(5), strict=True):
        param.grad = part
    bits, memory = _bits_of(params)
    assert len(bits) == 1 and len(set(memory.values())) == 1


def test_a_cpu_reads_no_longer_than_it_adds() -> None:
    """Integers of 32 bits summed in 64 take it 200 times as long."""
    param = nn.Parameter(torch.zeros(1 << 22))
    param.grad = torch.ones(1 << 22)

    def seconds(run: object) -> float:
        start = time.process_time()
        run()  # type: ignore[operator]
        return time.process_time() - start

    adds = min(seconds(lambda: param.grad.sum()) for _ in range(5))
    reads = min(seconds(lambda: _bits_of([param])) for _ in range(5))
    assert reads <= 20 * adds + 1e-3
