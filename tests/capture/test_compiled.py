"""Compiled models: norms, coefficients and clipped sums are those of one sample at a time."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping, Rule
from flash_clipping.factors import DenseGrad
from flash_clipping.rules import GradRequest, registry
from flash_clipping.rules.normalization import FoundRMSNormRule
from flash_clipping.rules.registry import find_rule
from tests.support.cases import bound_between, check_case, make_case, step_case
from tests.support.compiled import (
    LM,
    Backend,
    Language,
    Transformer,
    compare,
    last_layout,
    lm_loss,
    slow,
    with_adapters,
    wrap,
)
from tests.support.models import CASES, Case, floats
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
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(backend=backend, fullgraph=True)
    compare(module, truth, case, batch, bound)
    assert backend.graphs == 1


@pytest.mark.parametrize(
    ("backend", "checkpointing", "reduction"),
    [slow("eager", False, "mean"), slow("aot_eager", False, "mean"), ("aot_eager", True, "sum")],
)
def test_a_tied_transformer(backend: str, checkpointing: bool, reduction: str) -> None:
    case = Case(lambda: Transformer(checkpointing), LM.batch, lm_loss)
    model, batch = make_case(Case(Transformer, LM.batch, lm_loss), torch.float32)
    truth = per_sample_truth(model, batch, lm_loss)
    bound = bound_between(truth)
    module = wrap(make_case(case, torch.float32)[0], max_grad_norm=bound, loss_reduction=reduction)
    module.compile(backend=backend, fullgraph=True)
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        step_case(module, case, batch, reduction)
        check_case(module, truth, bound, 1e-5)


@needs_compiler
@pytest.mark.parametrize("kind", [Language, slow(Transformer)], ids=["small", "large"])
def test_inductor(kind: type[Language]) -> None:
    model, batch = make_case(Case(kind, LM.batch, lm_loss), torch.float32)
    truth = per_sample_truth(model, batch, lm_loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(fullgraph=True)
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        step_case(module, LM, batch, "mean")
        check_case(module, truth, bound, 1e-5)


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


def test_a_model_in_bfloat16() -> None:
    model, batch = make_case(LM, torch.bfloat16)
    eager = wrap(copy.deepcopy(model), max_grad_norm=0.5)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    for which in (eager, module):
        lm_loss(which, batch).mean().backward()
    assert_close(module.get_norm_sample(), eager.get_norm_sample(), 2e-2, "norms")
    for p, q in zip(model.parameters(), eager._module.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert p.grad.dtype == torch.float32
        assert_close(p.grad, q.grad, 5e-2)


@pytest.mark.parametrize("frozen", [slow("tokens"), slow("blocks.0"), slow("bias"), "weight"])
def test_frozen_parameters(frozen: str) -> None:
    case = LM
    model, batch = make_case(case, torch.float32)
    for name, param in model.named_parameters():
        param.requires_grad_(not (name.startswith(frozen) or name.endswith(frozen)))
    truth = per_sample_truth(model, batch, lm_loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(backend="eager", fullgraph=True)
    compare(module, truth, case, batch, bound)


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


def test_adapters() -> None:
    case, backend = Case(with_adapters, LM.batch, lm_loss), Backend()
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, lm_loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(backend=backend, fullgraph=True)
    compare(module, truth, case, batch, bound)
    assert backend.graphs == 1
    assert len(last_layout(module).slots) == 4  # two for each adapter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_without_eps(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.RMSNorm(6)).to(dtype)
    x = (torch.randn(4, 3, 6) * 1e-3).to(dtype)
    expected = copy.deepcopy(model)(x)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    assert_close(module(x).float(), expected.float(), 1e-2, "outputs")


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
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(backend=backend, fullgraph=True)
    compare(module, truth, case, batch, bound)
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
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(backend="aot_eager")
    compare(module, truth, case, batch, bound)


def test_recurrent_layers_run_by_themselves() -> None:
    """Their rule is that of a linear layer, whose rows are those of one time step."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(5, 3)
            self.recurrent = DPLSTM(4, 5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.recurrent(torch.tanh(self.first(x)))[0])

    case = Case(Recurrent, floats(5, 3, 4))
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(backend="aot_eager")
    compare(module, truth, case, batch, bound)


class OtherNorm(nn.Module):
    """An RMS norm as models of transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(4)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


def test_a_norm_that_reads_another_dtype_than_its_rule_serves() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 4), OtherNorm(), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x).double()).to(self.last.weight.dtype))

    case, backend = Case(Mixed, floats(5, 3, 4)), Backend()
    model, batch = make_case(case, torch.float32)
    assert type(find_rule(model.norm)) is FoundRMSNormRule
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(backend=backend, fullgraph=True)
    compare(module, truth, case, batch, bound)
    assert backend.graphs == 1
