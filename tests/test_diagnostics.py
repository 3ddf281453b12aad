"""``flash-clipping check`` and ``flash-clipping env``: what they find, and what they say."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from flash_clipping import (
    Dense,
    FlashClippingError,
    GradSampleModuleFlashClipping,
    Outer,
    Rule,
    register_rule,
)
from flash_clipping.__main__ import _print_rich, main
from flash_clipping.diagnostics import BadBatchError, CheckReport, check, environment
from flash_clipping.factors import RowSum
from flash_clipping.ops import linear
from flash_clipping.ops.runtime import backend as backends
from flash_clipping.rules import registry
from flash_clipping.rules.linear import LinearRule
from tests.models import CASES, Branchy, Wrapped
from tests.oracle import per_sample_truth


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rules that a test registers are gone afterwards."""
    before = dict(registry._RULES)
    yield
    registry._RULES.clear()
    registry._RULES.update(before)


def of(report: CheckReport, name: str):
    return next(parameter for parameter in report.parameters if parameter.name == name)


def statuses(report: CheckReport) -> dict[str, str]:
    return {parameter.name: parameter.status for parameter in report.parameters}


# -- models that are right ------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_rule_passes_in_float64(name: str) -> None:
    case = CASES[name]
    model, batch = case.make(), case.batch()
    report = check(model, batch, case.loss, dtype=torch.float64)
    assert report.passed, str(report)
    assert report.dtype == "float64" and report.tolerance == 1e-9
    # The two oracles share no code: one sample at a time, and vmap.
    truth = per_sample_truth(model, batch, case.loss)
    assert report.oracle_norms == pytest.approx(truth.norms.tolist(), rel=1e-9)
    for parameter in report.parameters:
        assert parameter.status == "PASS"
        assert parameter.oracle_norms == pytest.approx(
            truth.param_norms[parameter.name].tolist(), rel=1e-9, abs=1e-12
        )
    assert len(report.removals) == report.batch_size
    assert all(removal.passed for removal in report.removals)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_own_dtype_and_both_modes(mode: str, dtype: torch.dtype) -> None:
    case = CASES["attention"]
    report = check(case.make(), case.batch(), case.loss, dtype=dtype, mode=mode)
    assert report.passed, str(report)
    assert report.dtype == str(dtype).removeprefix("torch.")
    assert 0 < report.norm_error < report.tolerance  # computed, not copied


def test_batch_by_keyword_with_a_dataclass_as_output() -> None:
    @dataclasses.dataclass
    class Output:
        logits: Tensor
        length: int

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, *, features: Tensor, scale: float) -> Output:
            return Output(torch.tanh(self.head(features)) * scale, 3)

    report = check(Model(), {"features": torch.randn(5, 4), "scale": 2.0})
    assert report.passed and report.batch_size == 5, str(report)


def test_samples_on_the_second_axis() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x_TBd: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x_TBd)))

    report = check(Model(), torch.randn(7, 5, 4), batch_first=False, dtype=torch.float64)
    assert report.passed and report.batch_size == 5, str(report)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0])[-1], batch[1], reduction="none")

    batch = (torch.randn(7, 5, 4), torch.tensor([0, 1, 2, 0, 1]))
    report = check(Model(), batch, loss, batch_first=False, dtype=torch.float64)
    assert report.passed, str(report)


def test_a_poisoned_sample_is_expected_to_be_dropped() -> None:
    case = CASES["linear_3d"]
    (x,) = case.batch()
    x[2] = float("inf")
    report = check(case.make(), (x,), case.loss)
    assert report.passed, str(report)
    assert [math.isfinite(norm) for norm in report.oracle_norms] == [True, True, False, True, True]


def test_nothing_of_the_users_is_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(5, 4)
    copy, generator = x.clone(), torch.get_rng_state()
    assert check(model, x).passed
    assert model[1].p == 0.5 and model.training
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(x, copy) and torch.equal(torch.get_rng_state(), generator)
    GradSampleModuleFlashClipping(model)  # no hooks were left on it


# -- what it says about a parameter ---------------------------------------------------------------


class Linear(nn.Module):
    """Two linear layers of chosen sizes, so that the cost model has something to decide."""

    def __init__(self, d: int, p: int):
        super().__init__()
        self.one, self.two = nn.Linear(d, p), nn.Linear(p, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


@pytest.mark.parametrize(
    ("algorithm", "shape", "p", "mode"),
    [
        ("rank_one", (3, 8), 8, "one_pass"),
        ("gram", (3, 2, 64), 64, "one_pass"),
        ("outer_store", (3, 64, 16), 16, "one_pass"),
        ("outer", (3, 64, 16), 16, "two_pass"),  # which stores nothing
    ],
)
def test_algorithm_of_a_linear_layer_is_the_one_that_ran(
    algorithm: str, shape: tuple[int, ...], p: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: set[str] = set()

    def spy(module: ModuleType, name: str, label: Callable[[tuple[Any, ...]], str]) -> None:
        original = getattr(module, name)

        def spied(*args: Any, **kwargs: Any) -> Any:
            # The second layer has 2 output features.
            leaves = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            sizes = {leaf.shape[-1] for leaf in leaves if leaf.dim()}
            if p in sizes and 2 not in sizes:
                ran.add(label(args))
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, spied)

    def operation(args: tuple[Any, ...]) -> str:
        """What ``backend.run`` was asked for; the outer kernel's last argument is ``store``."""
        kind = args[0].__name__.partition("_")[0]
        return "outer_store" if kind == "outer" and args[-1] is True else kind

    spy(linear, "rank_one_sqnorms", lambda args: "rank_one")
    spy(backends, "run", operation)
    report = check(Linear(shape[-1], p), torch.randn(shape), removals=0, mode=mode)
    assert report.passed, str(report)
    weight = of(report, "one.weight")
    assert weight.algorithm == algorithm
    assert ran & {"rank_one", "gram", "outer", "outer_store"} == {algorithm}
    assert weight.rule == "LinearRule" and weight.backend == "torch"


def test_kinds_of_factors() -> None:
    report = check(CASES["mixed"].make(), CASES["mixed"].batch(), removals=0)
    found = {parameter.name: parameter.algorithm for parameter in report.parameters}
    assert found["embed.weight"] == "lookup"
    assert found["conv.weight"] == "convolution"
    assert found["norm.weight"] == found["conv.bias"] == "vector"
    assert of(report, "blocks.0.scale.gain").rule in ("generic", "bare")

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embed(ids)))

    report = check(Tied(), torch.randint(0, 11, (4, 7)), dtype=torch.float64)
    assert report.passed, str(report)
    assert of(report, "embed.weight").algorithm == "tied"
    assert of(report, "embed.weight").rule == "LinearRule + EmbeddingRule"


@pytest.mark.skipif(not backends.is_interpreting(), reason="needs Triton's interpreter")
def test_backend_is_the_one_asked_for() -> None:
    model, x = Linear(16, 16), torch.randn(2, 16, 16)
    report = check(model, x, backend="triton", removals=0)
    assert report.passed, str(report)
    assert of(report, "one.weight").algorithm == "outer_store"
    assert of(report, "one.bias").algorithm == "vector"
    broken = {name for name, _ in backends._broken}
    expected = "torch" if "outer_sqnorms" in broken else "triton"
    assert of(report, "one.weight").backend == expected
    assert of(check(model, x, backend="torch", removals=0), "one.weight").backend == "torch"


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_bare_parameter_passes(reentrant: bool, mode: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = checkpoint(lambda y: (y * self.scale).tanh(), x, use_reentrant=reentrant)
            return self.last(x)

    report = check(Scaled(), torch.randn(3, 4), mode=mode)
    assert report.passed, report.failures


@pytest.mark.skipif(not backends.is_interpreting(), reason="needs Triton's interpreter")
def test_a_kernel_that_failed_is_not_called_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_broken", {("outer_sqnorms", torch.float32)})
    report = check(Linear(16, 16), torch.randn(2, 16, 16), backend="triton", removals=0)
    assert of(report, "one.weight").backend == "torch"


def test_frozen_and_unused_parameters_are_listed_with_the_reason() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)
            self.used.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.used(x))

    report = check(Model(), torch.randn(5, 4))
    assert report.passed, str(report)
    assert statuses(report) == {
        "used.weight": "PASS",
        "used.bias": "frozen",
        "spare.weight": "unused",
        "spare.bias": "unused",
    }
    assert "requires_grad is False" in of(report, "used.bias").reason
    assert "does not depend on it" in of(report, "spare.weight").reason
    assert "unused" in str(report) and "frozen" in str(report)


def test_module_that_vmap_cannot_run_is_a_note(recwarn: pytest.WarningsRecorder) -> None:
    model = Wrapped(nn.Linear(3, 3), Branchy(), nn.Linear(3, 2))
    report = check(model, torch.randn(6, 3), dtype=torch.float64, force_functorch=True)
    assert report.passed, str(report)
    assert of(report, "layers.1.gain").rule == "generic, sample by sample"
    assert any("layers.1 (Branchy)" in note for note in report.notes)
    assert not any("Branchy" in str(warning.message) for warning in recwarn)


# -- sections -------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0])


class RecurrentCell(nn.Module):
    def __init__(self, cell: nn.Module):
        super().__init__()
        self.layer, self.head = cell, nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for x_Bd in x.unbind(1):
            state = self.layer(x_Bd, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "DPLSTM", "DPGRU"])
def test_gates_are_sections(kind: str) -> None:
    from opacus import layers

    if kind.startswith("DP"):
        model = Recurrent(getattr(layers, kind)(4, 6, batch_first=True))
    else:
        model = RecurrentCell(getattr(nn, kind)(4, 6))
    report = check(model, torch.randn(3, 5, 4), dtype=torch.float64)
    assert report.passed, str(report)
    gates = ["input", "forget", "cell", "output"] if "LSTM" in kind else ["reset", "update", "new"]
    suffix = "" if kind.endswith("Cell") else "_l0"
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        sections = of(report, f"layer.{name}{suffix}").sections
        assert [section.name for section in sections] == gates, name
        assert all(section.passed for section in sections)
    assert of(report, "head.weight").sections == ()


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_of_pytorch_are_exact_or_refused_by_name(kind: str) -> None:
    layer = getattr(nn, kind)(4, 6, batch_first=True)
    report = check(Recurrent(layer), torch.randn(3, 5, 4), dtype=torch.float64)
    if not report.passed:
        assert of(report, "layer.weight_ih_l0").status == "refused", str(report)
        assert f"DP{kind}" in report.failures[0]


def test_projections_of_attention_are_sections() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.3)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    report = check(Model(), torch.randn(3, 5, 8))
    assert report.passed, str(report)
    for name in ("in_proj_weight", "in_proj_bias"):
        sections = of(report, f"attention.{name}").sections
        assert [section.name for section in sections] == ["q", "k", "v"]
    assert of(report, "attention.out_proj.weight").sections == ()


class QKV(nn.Linear):
    """A fused projection whose class has a rule of its own in the tests below."""


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = QKV(4, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.qkv(x)))


def test_a_fault_in_one_section_is_found_there(own_rules: None) -> None:
    @register_rule(QKV)
    class Faulty(LinearRule):
        def backward(self, layer, saved, grad_output, needs):
            grad_input, factors = super().backward(layer, saved, grad_output, needs)
            bias = factors["bias"].dense().clone()
            bias[:, 4:8] *= 0.18
            return grad_input, {**factors, "bias": Dense(bias)}

    parts = {"qkv.weight": ("q", "k", "v"), "qkv.bias": ("q", "k", "v")}
    report = check(Fused(), torch.randn(5, 3, 4), sections=parts)
    assert not report.passed
    assert statuses(report)["qkv.bias"] == "FAIL"
    sections = {section.name: section for section in of(report, "qkv.bias").sections}
    assert not sections["k"].passed
    # Of the section's own gradients, 0.82 are missing, whatever the others are.
    assert sections["k"].norm_error == pytest.approx(0.82, abs=1e-3)
    # The other two are intact but for the coefficients, which depend on the whole norm.
    assert sections["q"].norm_error < 1e-4 and sections["v"].norm_error < 1e-4
    assert all(s.norm_error < 1e-4 for s in of(report, "qkv.weight").sections)


def test_sections_that_do_not_exist_are_refused() -> None:
    with pytest.raises(BadBatchError, match="'qkv.wieght', which the model does not have"):
        check(Fused(), torch.randn(5, 3, 4), sections={"qkv.wieght": ("q", "k", "v")})
    with pytest.raises(BadBatchError, match="7 equal parts, but its axis 0 has 12"):
        check(Fused(), torch.randn(5, 3, 4), sections={"qkv.weight": tuple("abcdefg")})


# -- models that are wrong ------------------------------------------------------------------------


def test_a_rule_with_a_wrong_norm_fails(own_rules: None) -> None:
    @register_rule(QKV)
    class Faulty(LinearRule):
        def backward(self, layer, saved, grad_output, needs):
            grad_input, factors = super().backward(layer, saved, grad_output, needs)
            A, G = saved[0], grad_output
            return grad_input, {**factors, "weight": Outer(A, G * 1.001)}

    report = check(Fused(), torch.randn(5, 3, 4))
    assert not report.passed
    assert of(report, "qkv.weight").norm_error == pytest.approx(1e-3, rel=0.01)
    assert statuses(report)["qkv.weight"] == "FAIL"
    assert "qkv.weight" in report.failures[0]


@pytest.mark.parametrize("flat", [False, True])
def test_a_rule_with_operands_of_other_shapes_is_refused_by_name(
    own_rules: None, flat: bool
) -> None:
    @register_rule(QKV)
    class Faulty(LinearRule):
        def backward(self, layer, saved, grad_output, needs):
            grad_input, factors = super().backward(layer, saved, grad_output, needs)
            if flat:
                outer = Outer(saved[0][:, 0], grad_output[:, 0])
            else:
                outer = Outer(saved[0], grad_output.unsqueeze(1))
            return grad_input, {**factors, "weight": outer}

    module = GradSampleModuleFlashClipping(Fused(), max_grad_norm=1.0)
    with pytest.raises(
        FlashClippingError, match=r"qkv \(QKV\): its rule returned an Outer of A_BTd"
    ):
        module(torch.randn(5, 3, 4)).sum().backward()


def test_a_rule_may_give_a_shape_as_a_list(own_rules: None) -> None:
    @register_rule(QKV)
    class Listing(LinearRule):
        def backward(self, layer, saved, grad_output, needs):
            grad_input, factors = super().backward(layer, saved, grad_output, needs)
            return grad_input, {**factors, "bias": RowSum(grad_output, list(layer.bias.shape))}

    assert check(Fused(), torch.randn(5, 3, 4)).passed


def test_a_rule_with_a_right_norm_and_a_wrong_sum_fails(own_rules: None) -> None:
    class Flipped(Dense):
        def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
            return -super().clipped_sum(coef_B, backend)

    @register_rule(QKV)
    class Faulty(LinearRule):
        def backward(self, layer, saved, grad_output, needs):
            grad_input, factors = super().backward(layer, saved, grad_output, needs)
            return grad_input, {**factors, "bias": Flipped(factors["bias"].dense())}

    report = check(Fused(), torch.randn(5, 3, 4))
    assert {name for name, status in statuses(report).items() if status == "FAIL"} == {"qkv.bias"}
    bias = of(report, "qkv.bias")
    assert bias.norm_error < 1e-4 and bias.sum_error == pytest.approx(2.0, abs=1e-4)


def test_batch_norm_is_refused_with_the_error_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    report = check(model, torch.randn(5, 4))
    assert not report.passed
    assert "BatchNorm1d" in report.failures[0]
    assert statuses(report) == {
        "0.weight": "not checked",
        "0.bias": "not checked",
        "1.weight": "refused",
        "1.bias": "refused",
        "2.weight": "not checked",
        "2.bias": "not checked",
    }
    assert of(report, "1.weight").reason == report.failures[0]
    report = check(model, torch.randn(5, 4), strict=False)
    assert "mixes samples" in report.failures[0] and "GroupNorm" in report.failures[0]
    assert statuses(report)["1.weight"] == "refused"


class Positions(nn.Module):
    """Tokens and positions; the positions are the same for all samples."""

    def __init__(self, per_sample: bool = False):
        super().__init__()
        self.per_sample = per_sample
        self.tokens, self.positions = nn.Embedding(11, 6), nn.Embedding(16, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        if self.per_sample:
            positions = positions.expand(ids.shape)
        return self.head(torch.tanh(self.tokens(ids) + self.positions(positions)))


def test_a_constant_input_with_the_batch_size_as_length_is_exact() -> None:
    for shape in ((5, 5), (5, 6), (5, 3)):
        for per_sample in (False, True):
            report = check(Positions(per_sample=per_sample), torch.randint(0, 11, shape))
            assert report.passed and statuses(report)["positions.weight"] == "PASS", report


class Windows(nn.Module):
    """Folds windows of 2 positions into the batch axis."""

    def __init__(self, together: bool = True):
        super().__init__()
        self.together = together
        self.window, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x_BTd: Tensor) -> Tensor:
        B = x_BTd.shape[0]
        windows = x_BTd.unflatten(1, (-1, 2))
        if self.together:
            folded = self.window(windows.flatten(0, 1)).unflatten(0, (B, -1))
        else:  # all first windows, then all second ones
            rows = self.window(windows.transpose(0, 1).flatten(0, 1))
            folded = rows.unflatten(0, (-1, B)).transpose(0, 1)
        return self.head(torch.tanh(folded.flatten(1, 2)))


def test_folded_windows_must_lie_together() -> None:
    x = torch.randn(5, 6, 4)
    report = check(Windows(), x)
    assert not report.passed and "window (Linear)" in report.failures[0]
    assert check(Windows(), x, folded_modules=["window"], dtype=torch.float64).passed
    # Declared, but in another order: right for no sample.
    report = check(Windows(together=False), x, folded_modules=["window"])
    assert statuses(report)["window.weight"] == "refused"
    assert "other values for the same samples" in report.failures[0]


class Centre(nn.Module):
    """Mixes samples, and has no parameter for a rule to look at."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_a_layer_that_mixes_samples_is_caught() -> None:
    model = nn.Sequential(nn.Linear(4, 6), Centre(), nn.Tanh(), nn.Linear(6, 2))
    report = check(model, torch.randn(5, 4))
    assert not report.passed
    assert statuses(report)["3.weight"] == "refused"
    assert any("depend on other samples" in failure for failure in report.failures)
    without = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    assert check(without, torch.randn(5, 4)).passed


def test_a_mixing_layer_that_one_sample_at_a_time_changes_is_caught() -> None:
    class OwnBatchNorm(nn.Module):
        """Under the generic rule it sees one sample, and so computes something else."""

        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh((x - x.mean(0)) * self.gain + 0.1)

    model = nn.Sequential(nn.Linear(4, 6), OwnBatchNorm(), nn.Linear(6, 2))
    report = check(model, torch.randn(5, 4))
    assert not report.passed
    text = " ".join(report.failures)
    assert "1 (OwnBatchNorm)" in text and "depend on other samples" in text


def test_a_mean_over_all_tokens_of_the_batch_is_caught() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    x, y = torch.randn(5, 6, 4), torch.randint(0, 3, (5, 6))

    def mean_over_tokens(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-1)

    assert check(Head(), (x, y), mean_over_tokens).passed  # equal lengths: harmless
    for sample in range(5):
        y[sample, : sample + 1] = -1  # unequal lengths
    report = check(Head(), (x, y), mean_over_tokens)
    assert not report.passed
    assert any("how many tokens" in failure for failure in report.failures)

    def mean_over_own_tokens(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        losses = F.cross_entropy(model(x).mT, y, ignore_index=-1, reduction="none")
        return losses.sum(1) / (y != -1).sum(1)

    assert check(Head(), (x, y), mean_over_own_tokens).passed


@pytest.mark.parametrize(("actual", "declared"), [("sum", "mean"), ("mean", "sum")])
def test_a_wrong_reduction_is_named(actual: str, declared: str) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        losses = model(batch).square().sum(1)
        return losses.sum() if actual == "sum" else losses.mean()

    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    report = check(model, x, loss, loss_reduction=declared)
    assert not report.passed
    text = " ".join(report.failures)
    assert f"reduced by '{actual}', but loss_reduction is '{declared}'" in text
    assert check(model, x, loss, loss_reduction=actual).passed


def test_random_numbers_in_forward_are_named() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.linear(x), training=self.training)

    report = check(Noisy(), torch.randn(5, 4))
    assert not report.passed and "model.eval()" in report.failures[0]
    assert check(Noisy().eval(), torch.randn(5, 4)).passed


def test_a_model_that_fails_by_itself_says_so() -> None:
    report = check(nn.Linear(4, 3), torch.randn(5, 7))
    assert not report.passed
    assert report.failures[0].startswith("The plain model fails on this batch")


def test_a_model_that_cannot_run_in_float64_is_checked_in_its_own_dtype() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.float())

    report = check(Single(), torch.randn(5, 4))
    assert report.passed, str(report)
    assert any("does not run in float64" in note for note in report.notes)


def test_a_model_that_needs_two_samples_has_no_oracle() -> None:
    class Squeezing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).squeeze(0).flatten(1)

    report = check(Squeezing(), torch.randn(5, 4))
    assert not report.passed and "one sample at a time" in report.failures[0]


class RunningMean(nn.Module):
    """No parameter, so nothing that validates layers looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("constant", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.steps.add_(1)
        return x * self.constant


def test_buffers_that_remember_samples_are_caught() -> None:
    model = nn.Sequential(RunningMean(), nn.Linear(4, 2))
    report = check(model, torch.randn(5, 4))
    assert len(report.failures) == 1 and "buffers: 0.mean." in report.failures[0]
    assert model[0].steps == 0  # the copies were fed, not the model
    assert check(model.eval(), torch.randn(5, 4)).passed


def test_a_loss_weighted_by_the_batch_is_caught() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])
    batch = (torch.randn(5, 4), torch.tensor([0, 0, 1, 2, 2]))

    def over_all_weights(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight)

    def own_weight(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight, reduction="none")

    report = check(nn.Linear(4, 3), batch, over_all_weights)
    assert not report.passed and any("its samples' own losses" in f for f in report.failures)
    assert check(nn.Linear(4, 3), batch, own_weight).passed


def test_one_sample_cannot_show_independence() -> None:
    report = check(nn.Linear(4, 3), torch.randn(1, 4))
    assert report.passed and not report.removals
    assert any("at least two" in note for note in report.notes)


def test_removals_are_limited_and_spread() -> None:
    report = check(nn.Linear(4, 3), torch.randn(9, 4), removals=3)
    assert [removal.sample for removal in report.removals] == [0, 3, 6]


@pytest.mark.parametrize(
    ("batch", "loss", "message"),
    [
        ("text", None, "holds no tensor with a batch axis"),
        (torch.randn(0, 4), None, "batch is empty"),
        (torch.randn(5, 4), lambda m, x: m(x), r"found shape \(5, 3\)"),
        (torch.randn(5, 4), lambda m, x: 1.0, r"found 1\.0"),
    ],
)
def test_unusable_batches_and_losses(batch: object, loss: object, message: str) -> None:
    with pytest.raises(BadBatchError, match=message):
        check(nn.Linear(4, 3), batch, loss)


def test_wrapped_models_are_refused() -> None:
    with pytest.raises(TypeError, match="wrapped already"):
        check(GradSampleModuleFlashClipping(nn.Linear(4, 3)), torch.randn(5, 4))
    with pytest.raises(TypeError, match="clipping"):
        check(nn.Linear(4, 3), torch.randn(5, 4), clipping="per_layer")


# -- the command ----------------------------------------------------------------------------------

FACTORIES = """
import torch
from torch import nn


def good():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(5, 4)


def with_loss():
    model, x = good()
    y = torch.tensor([0, 1, 2, 0, 1])
    loss = nn.CrossEntropyLoss()
    return model, (x, y), lambda model, batch: loss(model(batch[0]), batch[1])


def bad():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), torch.randn(5, 4)


def windows():
    from tests.test_diagnostics import Windows
    return Windows(), torch.randn(5, 6, 4)


def buffers():
    model, x = good()
    model[0].register_buffer("table", torch.arange(3))
    return model, x


def not_a_pair():
    return good()[0]


def four():
    return (*good(), None, None)


def swapped():
    model, x = good()
    return x, model


def frozen():
    model, x = good()
    return model.requires_grad_(False), x


def wrapped():
    from flash_clipping import GradSampleModuleFlashClipping
    model, x = good()
    return GradSampleModuleFlashClipping(model), x


def no_loss():
    return (*good(), "cross entropy")


def needs(path, size=3):
    return good()


def fails():
    return good(), undefined_name


def no_tensor():
    return good()[0], "a batch"


model = good()[0]
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_factories.py").write_text(FACTORIES)
    (tmp_path / "own_broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_factories"
    sys.modules.pop("own_factories", None)


def test_command_passes_and_prints_a_table(factories: str, capsys) -> None:
    assert main(["check", f"{factories}:good"]) == 0
    out = capsys.readouterr().out
    assert "0 (Linear)" in out and "LinearRule" in out and "rank_one" in out
    assert out.rstrip().endswith("PASS")
    assert (
        main(["check", f"{factories}:with_loss", "--dtype", "float64", "--mode", "two_pass"]) == 0
    )


def test_command_fails_with_status_one(factories: str, capsys) -> None:
    assert main(["check", f"{factories}:bad"]) == 1
    out = capsys.readouterr().out
    assert "refused" in out and out.rstrip().endswith("FAILED")
    # A tolerance that no rounding can meet.
    assert main(["check", f"{factories}:good", "--tolerance", "1e-30"]) == 1


def test_command_hands_options_to_the_wrapper(factories: str, capsys) -> None:
    assert main(["check", f"{factories}:windows"]) == 1
    assert main(["check", f"{factories}:windows", "--folded", "win*"]) == 0
    assert main(["check", f"{factories}:buffers"]) == 1
    assert "trainable layer with buffers" in capsys.readouterr().out
    assert main(["check", f"{factories}:buffers", "--no-strict"]) == 0


def test_command_prints_json(factories: str, capsys) -> None:
    assert main(["check", f"{factories}:with_loss", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True and report["batch_size"] == 5
    assert [p["name"] for p in report["parameters"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert report["parameters"][0]["algorithm"] == "rank_one"
    assert len(report["parameters"][0]["norms"]) == 5
    assert main(["check", f"{factories}:bad", "--json"]) == 1
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=pytest.fail)["norm_error"] == "nan"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_factories", "expected MODULE:FACTORY"),
        ("own_factories.good", "expected MODULE:FACTORY"),
        ("no_such_module_here:good", "cannot import 'no_such_module_here'"),
        ("own_broken:good", r"a_module_that_is_not_there.*line 1 of .*own_broken\.py"),
        ("own_factories:goood", "Did you mean good"),
        ("own_factories:model", "is a Sequential; expected a function"),
        ("own_factories:not_a_pair", "returned a Sequential; expected the tuple"),
        ("own_factories:four", "returned a tuple of 4"),
        ("own_factories:swapped", "returned a Tensor as model"),
        ("own_factories:frozen", "without a trainable parameter"),
        ("own_factories:wrapped", "wrapped for per-sample gradients already"),
        ("own_factories:no_loss", "returned a str as loss"),
        ("own_factories:needs", "it takes path"),
        ("own_factories:fails", r"NameError.*undefined_name.*line \d+ of .*own_factories\.py"),
        ("own_factories:no_tensor", "holds no tensor with a batch axis"),
    ],
)
def test_bad_factories_are_explained_with_status_two(
    factories: str, name: str, message: str, capsys
) -> None:
    assert main(["check", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and re.search(message, captured.err), captured.err


def test_command_line_runs_as_a_module(factories: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "flash_clipping", "check", "own_factories:bad"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert run.returncode == 1, run.stderr
    assert "BatchNorm1d" in run.stdout


def test_rich_is_optional(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    report = check(nn.Linear(4, 3), torch.randn(5, 4))
    for name in ("rich", "rich.console", "rich.table", "rich.markup", "rich.measure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert not _print_rich(report)
    assert capsys.readouterr().out == ""


def test_rich_table_has_the_same_rows(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "40")  # too narrow for the table; nothing is cut off
    report = check(nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 4))
    assert _print_rich(report)
    out = capsys.readouterr().out
    for word in ("0 (Linear)", "weight", "LinearRule", "rank_one", "PASS"):
        assert word in out


# -- the environment ------------------------------------------------------------------------------


def test_environment_report(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_CLIPPING_BACKEND", "torch")
    monkeypatch.setenv("SOME_TOKEN", "not to be printed")
    report = environment()
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["opacus"]
    assert report["variables"]["FLASH_CLIPPING_BACKEND"] == "torch"
    assert report["triton"]["available"] == backends.is_triton_available()
    assert report["triton"]["available"] or report["triton"]["why_not"]
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text and "FLASH_CLIPPING_BACKEND: torch" in text
    assert "not to be printed" not in text
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"] == report["versions"]


def test_environment_says_why_there_is_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_import_error", lambda: "ImportError: no such thing")
    assert environment()["triton"] == {
        "available": False,
        "interpreting": backends.is_interpreting(),
        "why_not": "ImportError: no such thing",
    }


# -- a rule of one's own, as docs/layers.md shows it ----------------------------------------------


def test_the_rule_in_the_documentation_works(own_rules: None) -> None:
    page = (Path(__file__).parents[1] / "docs" / "layers.md").read_text()
    block = page.split("<!-- tested: a rule of one's own -->")[1].split("```")[1]
    namespace: dict[str, object] = {}
    exec(block.removeprefix("python\n"), namespace)  # noqa: S102
    layer_type, rule_type = namespace["LowRankLinear"], namespace["LowRankLinearRule"]
    assert issubclass(rule_type, Rule)
    model = Wrapped(nn.Linear(5, 8), layer_type(8, 6, rank=2), nn.Linear(6, 3))
    report = check(model, torch.randn(4, 7, 5), dtype=torch.float64)
    assert report.passed, str(report)
    served = {p.rule for p in report.parameters if p.layer_type == "LowRankLinear"}
    assert served == {"LowRankLinearRule"}


# -- the documentation ----------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def anchors(page: Path) -> set[str]:
    """The anchors that a Markdown renderer makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_the_documentation_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize(
    ("page", "least"), [("guarantees.md", 15), ("attacks.md", 15), ("migrating-from-opacus.md", 2)]
)
def test_tests_that_are_named_in_the_documentation_exist(page: str, least: int) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / page).read_text())
    assert len(named) >= least
    for file, test in named:
        assert (ROOT / file).exists(), file
        source = (ROOT / file).read_text()
        assert not test or re.search(rf"^\s*(def|class) {test}\b", source, re.MULTILINE), test
