"""Kernels that are compiled before they are met."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashDPOptimizer, FlashPrivacyEngine
from flash_clipping.engine import optimizer as optimizers
from flash_clipping.engine.optimizer import DistributedFlashDPOptimizer
from flash_clipping.ops.runtime import backend
from flash_clipping.ops.runtime.tiles import launch


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_that_draws_noise_is_that_which_was_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    from flash_clipping.ops.noise import triton as noise

    seen: list[tuple[bool, Any]] = []

    def told(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        seen.append((backend.only_compiles(), constants))
        launch(kernel, programs, *args, **constants)

    monkeypatch.setattr(noise, "launch", told)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)).to("cuda", dtype)
    data = TensorDataset(torch.randn(16, 8).to(dtype), torch.randint(2, (16,)))
    engine = FlashPrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=4),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    before = [p.clone() for p in model.parameters()]
    x, y = next(iter(loader))
    criterion(model(x.cuda()), y.cuda()).backward()
    assert [ahead for ahead, _ in seen] == [True, True]
    optimizer.step()
    assert [ahead for ahead, _ in seen[2:]] == [False]
    assert seen[2][1] in [constants for _, constants in seen[:2]]
    assert all((p != q).any() for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", [FlashDPOptimizer, DistributedFlashDPOptimizer])
def test_noise_is_compiled_before_there_are_sums(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    dtypes = torch.float32, torch.bfloat16, torch.complex64
    params = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]
    plain = torch.optim.SGD(params, lr=0.1)
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 4}
    private, wanted = kind(plain, **given), list[Any]()
    monkeypatch.setattr(optimizers, "compile_ahead", wanted.append)
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(torch.Tensor, "is_cuda", True)
        private.compile_ahead()
    narrow = torch.float32 if kind is DistributedFlashDPOptimizer else torch.bfloat16
    assert len(wanted) == 2
    for work in wanted:
        assert [x.dtype for x in work()] == [torch.float32, narrow, torch.float32]


def test_what_fails_ahead_fails_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "compiles_kernels", lambda: True)
    backend.compile_ahead(lambda: 1 / 0)
    assert not backend.only_compiles()
