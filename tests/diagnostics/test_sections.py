"""Sections of a parameter: gates, projections, and faults found in one of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import DenseGrad, register_rule
from flash_clipping.diagnostics import BadBatchError, check
from flash_clipping.rules.linear import LinearRule
from tests.support.diagnosed import QKV, Fused, of, statuses


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


def test_a_fault_in_one_section_is_found_there(own_rules: None) -> None:
    @register_rule(QKV)
    class Faulty(LinearRule):
        def backward(self, layer, saved, grad_output, needs):
            grad_input, factors = super().backward(layer, saved, grad_output, needs)
            bias = factors["bias"].dense().clone()
            bias[:, 4:8] *= 0.18
            return grad_input, {**factors, "bias": DenseGrad(bias)}

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
