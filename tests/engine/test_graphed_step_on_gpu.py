"""Steps as CUDA graphs, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import (
    GradSampleModuleFlashClipping,
    GraphedStep,
)
from flash_clipping.ops.runtime import tables
from flash_clipping.ops.runtime.checks import device_checks
from tests.support.errors import raises
from tests.support.graphs import assert_same_tensors
from tests.support.models import CASES, Case, squared_loss
from tests.support.oracle import assert_close

on_gpu = pytest.mark.gpu


def case_on_gpu(
    case: Case, dtype: torch.dtype, **options: Any
) -> tuple[nn.Module, GradSampleModuleFlashClipping, list[tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    plain = case.make().to("cuda", dtype)
    drawn = [case.batch() for _ in range(2)]
    moved = [
        tuple(x.to("cuda", dtype if x.is_floating_point() else x.dtype) for x in batch)
        for batch in drawn
    ]
    return plain, GradSampleModuleFlashClipping(plain, max_grad_norm=0.5, **options), moved


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", CASES)
def test_every_rule_as_a_graph(name: str, mode: str, dtype: torch.dtype) -> None:
    """Replays on another batch than the captured one give that batch's bits."""
    case = CASES[name]
    plain, model, (first, second) = case_on_gpu(case, dtype, mode=mode)

    def run(*batch: Tensor) -> None:
        case.loss(model, batch).mean().backward()

    step = GraphedStep(run, model)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        step(*first)
    assert step.replays == 1
    model.zero_grad(set_to_none=True)
    step(*second)
    assert step.replays == 2
    found = [p.grad.clone() for p in plain.parameters()] + [model.get_norm_sample()]
    model.zero_grad(set_to_none=True)
    run(*second)
    expected = [*(p.grad for p in plain.parameters()), model.get_norm_sample()]
    if name == "conv2d_reflect":  # PyTorch's own backward adds in any order
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, 1e-5 if dtype == torch.float32 else 1e-2, name)
    else:
        assert_same_tensors(found, expected)


@on_gpu
@pytest.mark.parametrize("positions", [8, 96, 600])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_large_layers_as_a_graph(clipping: str, positions: int) -> None:
    """Stored gradients, products that are repaired, tables of every kind; a replay never waits."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(64, 512),
        nn.LayerNorm(512),
        nn.Dropout(0.1),
        nn.Linear(512, 512),
        nn.Linear(512, 8),
    ).to("cuda", torch.bfloat16)
    bound = [0.5] * len(list(plain.parameters())) if clipping == "per_layer" else 0.5
    model = GradSampleModuleFlashClipping(plain, max_grad_norm=bound, clipping=clipping)

    def run(x: Tensor) -> Tensor:
        loss = squared_loss(model, (x,)).mean()
        loss.backward()
        return loss

    step = GraphedStep(run, model)
    xs = [torch.randn(4, positions, 64, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    xs[5][2, 3] = torch.inf
    for i, x in enumerate(xs):
        model.zero_grad(set_to_none=True)
        torch.cuda.manual_seed(i)
        torch.cuda.synchronize()
        if i > 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            loss = step(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = [loss, *(p.grad.clone() for p in plain.parameters()), model.get_norm_sample()]
        model.zero_grad(set_to_none=True)
        torch.cuda.manual_seed(i)
        loss = run(x).detach()
        expected = [loss, *(p.grad for p in plain.parameters()), model.get_norm_sample()]
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
    assert step.replays == 3


@on_gpu
def test_graphs_of_several_sizes_share_memory() -> None:
    plain, model, _ = case_on_gpu(CASES["mixed"], torch.float32)
    case = CASES["mixed"]

    def run(*batch: Tensor) -> Tensor:
        losses = case.loss(model, batch)
        losses.mean().backward()
        return losses

    step = GraphedStep(run, model, warmup=2)
    torch.manual_seed(1)
    (full,) = [tuple(x.to("cuda") for x in case.batch())]
    sizes = [len(full[0]), len(full[0]) - 1, 1]
    audits = 0
    for turn in range(8):
        for size in sizes:
            batch = tuple(x[:size].roll(turn, 0) for x in full)
            model.zero_grad(set_to_none=True)
            audits += model._watch.gate.is_next  # of a call, not of a replay
            found = [step(*batch), *(p.grad.clone() for p in plain.parameters())]
            model.zero_grad(set_to_none=True)
            assert_same_tensors(
                found, [run(*batch).detach(), *(p.grad for p in plain.parameters())]
            )
    assert step.replays == 3 * 6 - audits


def allocated() -> int:
    """Bytes on the GPU, without the checks that wait for a step of an optimizer, and without the
    tables of addresses that are kept, a certain number."""
    device_checks.raise_found(wait=True)
    tables._copy.cache_clear()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@on_gpu
def test_hundreds_of_replays_do_not_grow() -> None:
    _, model, (batch, _) = case_on_gpu(CASES["mixed"], torch.float32)
    case = CASES["mixed"]
    step = GraphedStep(lambda *batch: case.loss(model, batch).mean().backward(), model)
    audits = 0
    for i in range(300):
        model.zero_grad(set_to_none=True)
        audits += model._watch.gate.is_next  # of a call, not of a replay
        step(*batch)
        if i == 20:
            before = allocated()
    assert allocated() <= before
    assert step.replays == 297 - audits and audits < 9


@on_gpu
def test_a_step_that_waits_is_refused_before_it_is_captured() -> None:
    _, model, (batch, _) = case_on_gpu(CASES["mixed"], torch.float32)
    case = CASES["mixed"]

    def run(*batch: Tensor) -> None:
        loss = case.loss(model, batch).mean()
        loss.backward()
        loss.item()

    step = GraphedStep(run, model)
    step(*batch)
    step(*batch)
    with raises("FC703", match="waits for the device"):
        step(*batch)
    assert torch.cuda.get_sync_debug_mode() == 0


@on_gpu
def test_a_batch_that_is_elsewhere() -> None:
    _, model, (batch, _) = case_on_gpu(CASES["mixed"], torch.float32)
    step = GraphedStep(lambda *batch: None, model)
    with raises("FC702", ValueError, match="cpu and cuda:0"):
        step(*(x.cpu() for x in batch))
