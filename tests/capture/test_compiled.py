"""Compiled models: norms, coefficients and clipped sums are those of one sample at a time."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import FlashClippingError, GradSampleModuleFlashClipping, Rule
from flash_clipping.capture.compiled.regions import Region
from flash_clipping.factors import DenseGrad
from flash_clipping.rules import GradRequest, registry
from tests.support.cases import bound_between, make_case, step_case
from tests.support.compiled import (
    LM,
    Backend,
    Language,
    Transformer,
    compare,
    compiled_exactly,
    last_layout,
    lm_loss,
    slow,
    wrap,
)
from tests.support.errors import raises
from tests.support.models import CASES, Case, floats, squared_loss
from tests.support.oracle import assert_close, per_sample_truth

pytestmark = [pytest.mark.usefixtures("nothing_compiled_yet"), pytest.mark.without_gate]


needs_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None and shutil.which("clang") is None, reason="needs a C++ compiler"
)


#: Cases of which every trainable layer is wired. The models of other tests have linear layers of
#: three axes, norms of layers and of mean squares.
WIRED = [
    "linear_2d",
    "transposed_linear",
    "embedding_padding",
    "group_norm",
    "conv2d_same",
    "instance_norm1d",
]


ALSO_WIRED = [
    "linear_3d",
    "layer_norm_2d",
    "rms_norm",
    "conv1d",
    "linear_5d",
    "embedding",
    "embedding_flat",
    "layer_norm",
    "layer_norm_plain",
    "group_norm_2d",
    "conv2d_groups",
    "conv2d_reflect",
    "conv3d",
    "instance_norm3d",
    "attention",
]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", [*WIRED, *map(slow, ALSO_WIRED)])
def test_wired_rules_match_the_oracle(name: str) -> None:
    case, backend = CASES[name], Backend()
    compiled_exactly(case, backend=backend, fullgraph=True)
    assert backend.graphs == 1


@needs_compiler
@pytest.mark.parametrize("kind", [Language, slow(Transformer)], ids=["small", "large"])
def test_inductor(kind: type[Language]) -> None:
    compiled_exactly(Case(kind, LM.batch, lm_loss), fullgraph=True)


def test_autocast() -> None:
    model, batch = make_case(LM, torch.float32)
    eager = wrap(copy.deepcopy(model), max_grad_norm=0.5)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    for which in (eager, module, eager, module):
        which.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = lm_loss(which, batch)
        losses.mean().backward()
    assert_close(module.get_norm_sample(), eager.get_norm_sample(), 2e-2, "norms")
    for p, q in zip(model.parameters(), eager._module.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert_close(p.grad, q.grad, 5e-2)
    # The operands that are multiplied are also those that are measured.
    assert torch.bfloat16 in {wire.dtype for wire in last_layout(module).wires}


def test_unfrozen_between_steps() -> None:
    case = LM
    model, batch = make_case(case, torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="eager", fullgraph=True)
    for frozen in ("blocks.0", "bias", "nothing"):
        for which in (plain, model):
            for name, param in which.named_parameters():
                param.requires_grad_(frozen not in name)
        compare(module, per_sample_truth(plain, batch, lm_loss), case, batch, 0.5, steps=1)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class ScaleRule(Rule):
    def can_be_traced(self, layer: Any) -> bool:
        return True

    def forward(self, layer: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return x * layer.gain, (x, layer.gain)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Any:
        x, gain = saved
        return grad_output * gain, {"gain": DenseGrad((grad_output * x).flatten(1, -2).sum(1))}


def test_a_rule_of_ones_own_in_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._RULES, Scale, ScaleRule())
    case, backend = (
        Case(lambda: nn.Sequential(Scale(), nn.Linear(4, 3)), floats(5, 3, 4)),
        Backend(),
    )
    compiled_exactly(case, backend=backend, fullgraph=True)
    assert backend.graphs == 1


class NumberedRule(ScaleRule):
    """Saves a number, which no graph hands on."""

    def forward(self, layer: Any, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        output, saved = super().forward(layer, x)
        return output, (*saved, 3)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Any:
        return super().backward(layer, saved[:2], grad_output, needs)


def test_a_rule_that_saves_a_number_runs_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._RULES, Scale, NumberedRule())
    case = Case(lambda: nn.Sequential(Scale(), nn.Linear(4, 3)), floats(5, 3, 4))
    compiled_exactly(case, backend="aot_eager")


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_compiled_in_whole_before_wrapping(how: str) -> None:
    model, batch = make_case(LM, torch.float32)
    truth = per_sample_truth(model, batch, lm_loss)
    bound, backend = bound_between(truth), Backend()
    if how == "torch.compile":
        compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
        names = {f"_orig_mod.{name}" for name in truth.grads}
        truth.grads = {f"_orig_mod.{name}": g for name, g in truth.grads.items()}
        truth.param_norms = {f"_orig_mod.{name}": n for name, n in truth.param_norms.items()}
        assert names == {name for name, _ in compiled.named_parameters()}
    else:
        model.compile(backend=backend, fullgraph=True)
        compiled = model
    before = vars(compiled).get("_compiled_call_impl"), vars(compiled).get("forward")
    module = wrap(compiled, max_grad_norm=bound)
    compare(module, truth, LM, batch, bound)
    assert backend.graphs == 1
    module.to_standard_module()
    assert (vars(compiled).get("_compiled_call_impl"), vars(compiled).get("forward")) == before
    assert not any("__deepcopy__" in vars(part) for part in compiled.modules())
    assert backend.graphs == 1


@pytest.mark.parametrize(
    ("checkpointing", "wrapped_first"), [(False, False), slow(False, True), (True, True)]
)
def test_blocks(checkpointing: bool, wrapped_first: bool) -> None:
    """Blocks of one type share what was compiled."""
    backend = Backend()
    case = Case(lambda: Language(checkpointing, blocks=3), LM.batch, lm_loss)
    plain = Case(lambda: Language(blocks=3), LM.batch, lm_loss)
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(make_case(plain, torch.float32)[0], batch, lm_loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound) if wrapped_first else None
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    module = module or wrap(model, max_grad_norm=bound)
    compare(module, truth, case, batch, bound)
    assert backend.graphs == 1
    module.to_standard_module()
    assert not any(isinstance(b._compiled_call_impl, Region) for b in model.blocks)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_a_layer_inside_and_outside_of_a_block(mode: Any) -> None:
    """Uses inside a compiled block count as those outside do."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.block[0](self.block(x))

    case = Case(Both, floats(5, 3, 4))
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    model.block.compile(backend="aot_eager", fullgraph=True)
    compare(wrap(model, max_grad_norm=0.5, mode=mode), truth, case, batch, 0.5)


def test_shapes_are_learned_once_for_each_length() -> None:
    runs = 0

    class Counted(Language):
        def forward(self, ids: Tensor) -> Tensor:
            nonlocal runs
            if not torch.compiler.is_dynamo_compiling():
                runs += 1
            return super().forward(ids)

    torch.manual_seed(0)
    module = wrap(Counted(), max_grad_norm=0.5)
    module.compile(backend="eager", fullgraph=True)
    lm_loss(module, (torch.randint(0, 13, (4, 6)),)).mean().backward()
    rehearsed = runs
    for shape in [(7, 6), (5, 9), (3, 5), (1, 6)]:
        module.zero_grad(set_to_none=True)
        lm_loss(module, (torch.randint(0, 13, shape),)).mean().backward()
        assert module.get_norm_sample().shape == shape[:1]
    assert runs - rehearsed == 3  # two lengths, and a single sample


@pytest.mark.parametrize("fullgraph", [slow(False), True])
def test_lengths_inside_that_do_not_follow_evenly(fullgraph: bool) -> None:
    class Halved(nn.Module):
        """Rounds down: an odd length has what an even one has."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.second(x[:, : x.shape[1] // 2])

    model, _ = make_case(Case(Halved, floats(5, 4, 4)), torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=fullgraph)
    for length in (4, 8, 7, 9):
        batch = (torch.randn(5, length, 4),)
        truth = per_sample_truth(plain, batch, squared_loss)
        compare(module, truth, Case(Halved, lambda: (), squared_loss), batch, 0.5, steps=1)


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


@pytest.mark.parametrize(
    "name", ["generic", "torch_attention", slow("embedding_bag_sum"), slow("mixed")]
)
def test_other_layers_break_the_graph(name: str) -> None:
    case = CASES[name]
    compiled_exactly(case, backend="aot_eager")


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
    """Also where the model changes its ways after it was proven. Dynamo itself refuses to leave a
    full graph for a layer inside of a derivative."""
    torch.manual_seed(0)
    model = Switched(use)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=fullgraph)
    x = torch.randn(5, 3, 4)
    squared_loss(module, (x,)).mean().backward()
    module.zero_grad(set_to_none=True)
    model.on = True
    if fullgraph and use is with_its_derivative:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="by_itself"):
            module(x)
        return
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


@pytest.mark.parametrize("of", ["the wrapped model", "the model inside"])
def test_what_is_compiled_from_outside_is_still_checked(of: str) -> None:
    """The graph breaks where runs are compared."""
    torch.manual_seed(0)
    inside, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(3, 2, 4)
    truth = per_sample_truth(inside, (x,), squared_loss)
    wrapped = GradSampleModuleFlashClipping(inside)
    model: Any = wrapped
    if of == "the wrapped model":
        model = torch.compile(wrapped, backend="eager")
    else:
        inside.compile(backend="eager")
    squared_loss(model, (x,)).mean().backward()
    assert_close(wrapped.get_norm_sample(), truth.norms, 1e-5, "norms")
