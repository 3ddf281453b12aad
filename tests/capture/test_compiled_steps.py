"""Compiled models: all that a training step does beside one forward and one backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine
from flash_clipping._compat import has_lasting_node
from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from tests.support.cases import check_case, make_case, step_case
from tests.support.compiled import (
    LM,
    Backend,
    compare,
    lm_loss,
    slow,
    wrap,
)
from tests.support.models import CASES
from tests.support.oracle import assert_close, per_sample_truth

pytestmark = [pytest.mark.usefixtures("nothing_compiled_yet"), pytest.mark.without_gate]


@pytest.mark.filterwarnings("ignore::flash_clipping.randomness.SeededNoiseWarning")
@pytest.mark.parametrize("wrap_model", [True, slow(False)])
def test_engine_with_poisson_batches(wrap_model: bool) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 5, 4), torch.randint(0, 3, (24,)))

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(torch.relu(self.first(x))).mean(1))

    def train(compiled: bool) -> tuple[list[Tensor], list[tuple[int, int]]]:
        torch.manual_seed(1)
        model: Any = Classifier()
        hooks: Any = None
        loader: Any
        sizes: list[tuple[int, int]] = []
        engine = FlashPrivacyEngine(seed=1)  # the same batches in both
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, batch_size=2)
        params = [*model.parameters()]
        found = engine.make_private(
            module=model,
            optimizer=optimizer,
            criterion=nn.CrossEntropyLoss(),
            data_loader=loader,
            noise_multiplier=0.0,
            max_grad_norm=0.5,
            **({} if wrap_model else {"wrap_model": False}),
        )
        hooks, optimizer, criterion, loader = found
        if compiled:
            hooks.compile(backend="aot_eager", fullgraph=True)
        run = hooks if wrap_model else model
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                criterion(run(x), y).backward()
                sizes.append((len(x), len(hooks.get_norm_sample())))
                optimizer.step()
        return [p.detach() for p in params], sizes

    torch.manual_seed(0)
    eager, sizes = train(False)
    torch.manual_seed(0)
    compiled, same = train(True)
    assert sizes == same and (1, 0) in sizes and len(set(sizes)) > 3  # a draw without samples
    for p, q in zip(eager, compiled, strict=True):
        assert_close(q, p, 1e-5)


def test_hooks_without_a_wrapper() -> None:
    case = CASES["linear_3d"]
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    hooks = GradSampleHooksFlashClipping(model, max_grad_norm=0.5)
    backend = Backend()
    hooks.compile(backend=backend, fullgraph=True)
    case.loss(model, batch).mean().backward()
    assert_close(hooks.get_norm_sample(), truth.norms, 1e-5)
    assert backend.graphs == 1


def test_copies_are_not_compiled() -> None:
    case = CASES["linear_3d"]
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    backend = Backend()
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend=backend, fullgraph=True)
    step_case(module, case, batch, "mean")
    other = copy.deepcopy(module)
    for which in (other, module):
        which.zero_grad(set_to_none=True)
        step_case(which, case, batch, "mean")
        check_case(which, truth, 0.5, 1e-5)
    assert backend.graphs == 1


def test_the_model_comes_back_as_it_was() -> None:
    case = CASES["linear_3d"]
    model, batch = make_case(case, torch.float32)
    module = wrap(model)
    module.compile(backend="eager")
    step_case(module, case, batch, "mean")
    plain = module.to_standard_module()
    assert plain is model and not any("forward" in vars(m) for m in model.modules())


def test_dropout_draws_as_without_wires() -> None:
    """Learning shapes leaves generators as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    plain, x = copy.deepcopy(model), torch.randn(5, 4)
    module = wrap(model)
    module.compile(backend="aot_eager", fullgraph=True)
    outputs: list[Tensor] = []
    run: Callable[[Tensor], Tensor]
    for run in (plain, module, module):
        torch.manual_seed(3)
        outputs.append(run(x))
    assert_close(outputs[1], outputs[0], 1e-6)
    assert_close(outputs[2], outputs[0], 1e-6)


@pytest.mark.parametrize("what", ["input", "one parameter"])
def test_gradients_of_something_alone(what: str) -> None:
    case = CASES["linear_3d"]
    model, (x,) = make_case(case, torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=1.0)
    module.compile(backend="aot_eager", fullgraph=True)
    x = x.requires_grad_()
    step_case(module, case, (x,), "mean")
    module.zero_grad(set_to_none=True)
    x.grad = None
    if what == "input":
        (found,) = torch.autograd.grad(case.loss(module, (x,)).mean(), x)
        (expected,) = torch.autograd.grad(case.loss(plain, (x,)).mean(), x)
        assert_close(found, expected, 1e-5)
        assert all(param.grad is None for param in model.parameters())
        return
    one = model.layers[0].bias
    case.loss(module, (x,)).mean().backward(inputs=[one])
    assert one.grad is not None
    assert [param.grad is not None for param in model.parameters()].count(True) == 1


def test_hooks_that_are_disabled_give_ordinary_gradients() -> None:
    model, batch = make_case(LM, torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=1e-3)
    module.compile(backend="aot_eager", fullgraph=True)
    lm_loss(module, batch).mean().backward()  # clipped
    lm_loss(plain, batch).mean().backward()
    clipped = [p.grad for p in model.parameters()]
    for late in (False, True):
        module.zero_grad(set_to_none=True)
        if late:  # after the forward
            module.enable_hooks()
            loss = lm_loss(module, batch).mean()
            module.disable_hooks()
        else:
            module.disable_hooks()
            loss = lm_loss(module, batch).mean()
        loss.backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert_close(p.grad, q.grad, 1e-5)
    module.enable_hooks()
    module.zero_grad(set_to_none=True)
    lm_loss(module, batch).mean().backward()
    for p, expected in zip(model.parameters(), clipped, strict=True):
        assert p.grad is not None and expected is not None
        assert_close(p.grad, expected, 1e-6)


def test_without_gradients_and_in_eval_mode() -> None:
    model, batch = make_case(LM, torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=1.0)
    module.compile(backend="aot_eager", fullgraph=True)
    expected = plain(*batch)
    with torch.no_grad():
        assert_close(module(*batch), expected, 1e-5)
        module.eval()
        assert_close(module(*batch), expected, 1e-5)
    assert_close(module(*batch), expected, 1e-5)
    module.train()
    truth = per_sample_truth(plain, batch, lm_loss)
    compare(module, truth, LM, batch, 1.0)


def test_two_backwards_before_a_step() -> None:
    case = CASES["linear_3d"]
    model, (x,) = make_case(case, torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=0.5)
    module.allow_grad_accumulation()
    module.compile(backend="aot_eager", fullgraph=True)
    parts = [(x[:2],), (x[2:],)]
    expected: dict[str, Tensor] = {}
    for part in parts:
        case.loss(module, part).sum().div(len(part[0])).backward()
        for name, clipped in per_sample_truth(plain, part, case.loss).clipped(0.5).items():
            expected[name] = expected.get(name, 0) + clipped
    for name, param in model.named_parameters():
        assert param.grad is not None
        assert_close(param.grad, expected[name], 1e-5)


def test_two_forwards_and_one_backward() -> None:
    case = CASES["linear_3d"]
    model, (x,) = make_case(case, torch.float32)
    truth = per_sample_truth(
        model, (x, x * 2), lambda m, b: case.loss(m, b[:1]) + case.loss(m, b[1:])
    )
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        (case.loss(module, (x,)) + case.loss(module, (x * 2,))).mean().backward()
        check_case(module, truth, 0.5, 1e-5)


@pytest.mark.parametrize(
    ("clipping", "blocks"), [("flat", False), ("flat", True), slow("per_layer", False)]
)
def test_two_passes(clipping: str, blocks: bool) -> None:
    model, batch = make_case(LM, torch.float32)
    bound: Any = 0.5 if clipping == "flat" else [0.1] * len([*model.parameters()])
    eager = wrap(copy.deepcopy(model), max_grad_norm=bound, clipping=clipping)
    if blocks:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        module = wrap(model, max_grad_norm=bound, clipping=clipping, mode="two_pass")
    else:
        module = wrap(model, max_grad_norm=bound, clipping=clipping, mode="two_pass")
        module.compile(backend="aot_eager", fullgraph=True)
    sizes = (batch[0], batch[0][:3])  # another size is compiled again, with sizes as symbols
    for ids in sizes[: 1 if blocks else 2]:
        for which in (eager, module):
            which.zero_grad(set_to_none=True)
            lm_loss(which, (ids,)).mean().backward()
        assert_close(module.get_norm_sample(), eager.get_norm_sample(), 1e-5)
        for p, q in zip(model.parameters(), eager._module.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert_close(p.grad, q.grad, 1e-5)


@pytest.mark.slow
def test_a_wrapped_model_that_is_compiled_from_outside() -> None:
    """Its hooks break the graph, and so does every layer."""
    case = CASES["linear_3d"]
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    module = wrap(model, max_grad_norm=0.5)
    compiled = torch.compile(module, backend="aot_eager")
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        case.loss(compiled, batch).mean().backward()
        check_case(module, truth, 0.5, 1e-5)


def test_nothing_holds_the_graph_of_a_step() -> None:
    """A capture as a CUDA graph would fail, as long as nodes of parameters last."""
    model, batch = make_case(LM, torch.float32)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        lm_loss(module, batch).mean().backward()
        assert not any(has_lasting_node(param) for param in model.parameters())
