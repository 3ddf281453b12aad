"""Compiled models: layers used in other ways, layers that break graphs, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import FlashClippingError, GradSampleModuleFlashClipping
from tests.support.cases import bound_between, make_case, step_case
from tests.support.compiled import (
    compare,
    slow,
    wrap,
)
from tests.support.errors import raises
from tests.support.models import CASES, Case, floats, squared_loss
from tests.support.oracle import assert_close, per_sample_truth

pytestmark = [pytest.mark.usefixtures("nothing_compiled_yet"), pytest.mark.without_gate]


class Shared(nn.Module):
    """One layer called twice, on inputs of two shapes, and three readers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.readers = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.shared(x)))
        y = self.norm(self.shared(input=x[:, :2]))
        x = torch.cat([x, y], dim=1)
        return sum(torch.sin(reader(x) * (i + 1)) for i, reader in enumerate(self.readers))


@pytest.mark.parametrize("clipping", [slow("flat"), "per_layer", slow("automatic")])
def test_layers_that_are_called_twice(clipping: str) -> None:
    case = Case(Shared, floats(5, 7, 6))
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound: Any = 0.3 if clipping != "per_layer" else [0.1] * 10
    eager = wrap(copy.deepcopy(model), max_grad_norm=bound, clipping=clipping)
    module = wrap(model, max_grad_norm=bound, clipping=clipping)
    module.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for which in (eager, module):
            which.zero_grad(set_to_none=True)
            step_case(which, case, batch, "mean")
        assert_close(module.get_norm_sample(), truth.norms, 1e-5)
        assert_close(module.get_clipping_coef(), eager.get_clipping_coef(), 1e-5)
        for p, q in zip(model.parameters(), eager._module.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert_close(p.grad, q.grad, 1e-5)


def test_samples_along_the_second_axis() -> None:
    case = Case(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)),
        floats(7, 5, 4),
        lambda model, batch: model(*batch).square().sum((0, 2)),
    )
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(
        model, (batch[0].transpose(0, 1),), lambda m, b: m(b[0]).square().sum((1, 2))
    )
    module = wrap(model, max_grad_norm=1.0, batch_first=False)
    module.compile(backend="aot_eager", fullgraph=True)
    compare(module, truth, case, batch, 1.0)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        return self.left(x), self.right(x)


def test_an_output_that_is_not_used() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(*batch)[0].square().flatten(1).sum(1)

    case = Case(TwoOutputs, floats(5, 7, 4), loss)
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, loss)
    module = wrap(model, max_grad_norm=1.0)
    module.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        step_case(module, case, batch, "mean")
        assert_close(module.get_norm_sample(), truth.norms, 1e-5)
        assert_close(model.first.weight.grad, truth.clipped(1.0)["first.weight"], 1e-5)
        assert model.right.weight.grad is not None and not model.right.weight.grad.any()


@pytest.mark.parametrize(
    "name", ["generic", "torch_attention", slow("embedding_bag_sum"), slow("mixed")]
)
def test_other_layers_break_the_graph(name: str) -> None:
    case = CASES[name]
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(backend="aot_eager")
    compare(module, truth, case, batch, bound)


def test_layers_that_run_by_themselves_are_traced_once_for_all_blocks() -> None:
    """Not once for each layer, until the compiler has had enough."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return x + self.attention(x, x, x, need_weights=False)[0]

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Attending() for _ in range(10))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    case = Case(Deep, floats(3, 5, 4))
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    for block in model.blocks:
        block.compile(backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        compare(wrap(model, max_grad_norm=bound), truth, case, batch, bound)


def test_without_breaks_other_layers_are_refused() -> None:
    case = CASES["embedding_bag_sum"]
    model, batch = make_case(case, torch.float32)
    module = wrap(model)
    module.compile(backend="aot_eager", fullgraph=True)
    with raises("FC710", match="EmbeddingBagRule.*traced"):
        case.loss(module, batch)


def test_a_layer_on_both_sides_of_a_break() -> None:
    """What follows a break does not use the wires again."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.layer(x))
            torch._dynamo.graph_break()
            for _ in range(2):
                x = self.half(x)
            return x

        def half(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.layer(x))
            torch._dynamo.graph_break()
            return x + 1

    case = Case(Broken, floats(5, 3, 4))
    model, batch = make_case(case, torch.float32)
    plain = copy.deepcopy(model)
    eager = wrap(plain, max_grad_norm=0.5)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager")
    for _ in range(3):
        for which in (eager, module):
            which.zero_grad(set_to_none=True)
            step_case(which, case, batch, "mean")
        assert_close(module.get_norm_sample(), eager.get_norm_sample(), 1e-5)
        assert_close(model.layer.weight.grad, plain.layer.weight.grad, 1e-5)


# -- programs that compiled code runs and rehearsals might not -------------------------------------


class Switched(nn.Module):
    """Uses ``mid`` as an ordinary layer, and in another way once ``on``."""

    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.mid = nn.Linear(4, 4), nn.Linear(4, 4)
        self.use, self.on = use, False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.use(self.mid, x) if self.on else self.mid(x)


def with_other_weights(mid: nn.Module, x: Tensor) -> Tensor:
    doubled = {name: param * 2 for name, param in mid.named_parameters()}
    return torch.func.functional_call(mid, doubled, (x,))


def with_its_derivative(mid: nn.Module, x: Tensor) -> Tensor:
    y, vjp = torch.func.vjp(mid, x)
    return y + vjp(x)[0]


@pytest.mark.parametrize(
    ("use", "fullgraph"),
    [
        (with_other_weights, True),
        slow(with_other_weights, False),
        slow(with_its_derivative, True),
        (with_its_derivative, False),
    ],
)
def test_what_is_refused_uncompiled_is_no_number_when_compiled(
    use: Callable[[nn.Module, Tensor], Tensor], fullgraph: bool
) -> None:
    """Also where the model changes its ways after it was proven."""
    torch.manual_seed(0)
    model = Switched(use)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=fullgraph)
    x = torch.randn(5, 3, 4)
    squared_loss(module, (x,)).mean().backward()
    module.zero_grad(set_to_none=True)
    model.on = True
    with raises("FC141|FC402", (FlashClippingError, RuntimeError)):
        squared_loss(module, (x,)).mean().backward()


def test_rows_that_only_compiled_code_mixes_are_refused() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mid = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            if torch.compiler.is_compiling():
                return self.mid(x.flip(0)).flip(0)
            return self.mid(x)

    module = GradSampleModuleFlashClipping(Mixed(), max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    with raises("FC202", match=r"mid \(Linear\): what it reads has a row"):
        squared_loss(module, (torch.randn(5, 3, 4),)).mean().backward()


def test_a_subgraph_that_is_run_several_times_has_no_wires() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mid = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.block(self.block(self.block(x)))

        @torch.compiler.nested_compile_region
        def block(self, x: Tensor) -> Tensor:
            return torch.tanh(self.mid(x))

    torch.manual_seed(0)
    model = Nested()
    x = torch.randn(5, 3, 4)
    truth = per_sample_truth(copy.deepcopy(model), (x,), squared_loss)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    try:
        squared_loss(module, (x,)).mean().backward()
    except RuntimeError:
        return  # Dynamo, or this library, refused
    assert_close(module.get_norm_sample(), truth.norms, 1e-5, "norms")
