"""Compiled by Inductor on a GPU, with CUDA graphs and without: sums are those of one at a time.

``mode="reduce-overhead"`` replays graphs whose tensors lie where they lay: what a step leaves must
be read before the next one writes there, and parameters must be read anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from flash_clipping import GradSampleModuleFlashClipping, GraphedStep
from tests.support.compiled import Transformer, lm_loss, with_adapters
from tests.support.oracle import Truth, assert_close, per_sample_truth

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("nothing_compiled_yet"),
    pytest.mark.without_gate,
]

every_mode = pytest.mark.parametrize("mode", ["default", "reduce-overhead"])


def wrapped(model: nn.Module, mode: str, **options: float) -> GradSampleModuleFlashClipping:
    module = GradSampleModuleFlashClipping(model, max_grad_norm=0.5, **options)
    module.compile(fullgraph=True, mode=mode)
    return module


def tokens(samples: int) -> torch.Tensor:
    return torch.randint(0, 13, (samples, 16), device="cuda")


def check(module: GradSampleModuleFlashClipping, truth: Truth) -> None:
    # The model's own forward and backward, in fp32 on a GPU, are no nearer.
    assert_close(module.get_norm_sample(), truth.norms, 1e-4, "norms")
    clipped = truth.clipped(0.5)
    for name, param in module._module.named_parameters():
        if param.requires_grad:
            assert_close(param.grad, clipped[name], 1e-3, name)


@every_mode
@pytest.mark.parametrize(
    "make",
    [Transformer, lambda: Transformer(checkpointing=True), with_adapters],
    ids=["tied", "checkpointed", "adapters"],
)
def test_steps_with_changing_parameters(mode: str, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().cuda()
    plain = copy.deepcopy(model)
    if isinstance(plain, Transformer):
        for block in plain.blocks:
            block.checkpointing = False
    module = wrapped(model, mode)
    norms = []
    for _ in range(5):  # warmed up, captured, and replayed
        batch = (tokens(6),)
        plain.load_state_dict(model.state_dict())
        truth = per_sample_truth(plain, batch, lm_loss)
        module.zero_grad(set_to_none=True)
        lm_loss(module, batch).mean().backward()
        check(module, truth)
        norms.append((module.get_norm_sample(), truth.norms))
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= 0.5 * param.grad
    for found, expected in norms:  # no later step wrote over them
        assert_close(found, expected, 1e-4)


@every_mode
def test_batches_of_many_sizes(mode: str) -> None:
    torch.manual_seed(0)
    model = Transformer().cuda()
    plain = copy.deepcopy(model)
    module = wrapped(model, mode)
    for samples in (4, 7, 4, 5, 7, 9, 4):
        batch = (tokens(samples),)
        truth = per_sample_truth(plain, batch, lm_loss)
        module.zero_grad(set_to_none=True)
        lm_loss(module, batch).mean().backward()
        check(module, truth)


@every_mode
def test_two_forwards_before_their_backwards(mode: str) -> None:
    """Losses of two batches, backward one after the other; sums add up."""
    torch.manual_seed(0)
    model = Transformer().cuda()
    plain = copy.deepcopy(model)
    module = wrapped(model, mode)
    for _ in range(3):
        batches = [(tokens(4),), (tokens(4),)]
        truths = [per_sample_truth(plain, batch, lm_loss) for batch in batches]
        module.zero_grad(set_to_none=True)
        for batch in batches:
            lm_loss(module, batch).mean().backward()
        for name, param in model.named_parameters():
            total = sum(truth.clipped(0.5)[name] for truth in truths)
            assert_close(param.grad, total, 1e-3, name)


@every_mode
def test_autocast(mode: str) -> None:
    torch.manual_seed(0)
    model = Transformer().cuda()
    eager = GradSampleModuleFlashClipping(copy.deepcopy(model), max_grad_norm=0.5)
    module = wrapped(model, mode)
    for _ in range(4):
        batch = (tokens(6),)
        for each in (eager, module):
            each.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                losses = lm_loss(each, batch)
            losses.mean().backward()
        assert_close(module.get_norm_sample(), eager.get_norm_sample(), 2e-2, "norms")
        for p, q in zip(model.parameters(), eager._module.parameters(), strict=True):
            assert_close(p.grad, q.grad, 5e-2)


@pytest.mark.parametrize("make", [Transformer, with_adapters], ids=["tied", "adapters"])
def test_a_graph_of_a_compiled_model(make: Callable[[], nn.Module]) -> None:
    """All of the step is one launch: compiled kernels, and the end of the backward pass."""
    torch.manual_seed(0)
    model = make().cuda()
    plain = copy.deepcopy(model)
    module = wrapped(model, "default")

    def forward_backward(ids: torch.Tensor) -> torch.Tensor:
        losses = lm_loss(module, (ids,))
        losses.mean().backward()
        return losses

    step = GraphedStep(forward_backward, module)
    for _ in range(6):
        ids = tokens(6)
        plain.load_state_dict(model.state_dict())
        truth = per_sample_truth(plain, (ids,), lm_loss)
        module.zero_grad(set_to_none=True)
        step(ids)
        check(module, truth)
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= 0.5 * param.grad
    assert step.replays >= 2
