"""What ``check`` says about a parameter: rule, kind of factor, why none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import Kernels
from flash_clipping.diagnostics import check
from flash_clipping.ops.runtime import backend as backends
from tests.support.diagnosed import of, statuses
from tests.support.models import CASES


def test_rules_of_parameters() -> None:
    report = check(CASES["mixed"].make(), CASES["mixed"].batch(), removals=0)
    assert of(report, "embed.weight").rule == "EmbeddingRule"
    assert of(report, "conv.bias").rule == "ConvolutionRule"
    assert of(report, "blocks.0.scale.gain").rule == "bare"
    assert "Rule 'bare': read by a module without a rule." in str(report)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embed(ids)))

    report = check(Tied(), torch.randint(0, 11, (4, 7)), dtype=torch.float64)
    assert report.passed, str(report)
    assert of(report, "embed.weight").rule == "EmbeddingRule + LinearRule"


@pytest.mark.skipif(not backends.is_interpreting(), reason="needs Triton's interpreter")
def test_a_backend_that_is_asked_for() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    report = check(model, torch.randn(2, 16, 16), kernels=Kernels("triton"), removals=0)
    assert report.passed, str(report)
    assert of(report, "0.weight").rule == "LinearRule"


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


def test_frozen_and_unused_parameters_are_listed() -> None:
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
    assert any("still receive noise" in note for note in report.notes)
    assert "unused" in str(report) and "frozen" in str(report)


def test_samples_one_at_a_time_are_beside_the_oracle_too() -> None:
    """Also what no rule serves: a gradient of a gradient."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            energy = self.last(torch.tanh(self.first(x))).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force

    report = check(Energy(), torch.randn(5, 4), mode="one_by_one")
    assert report.passed, str(report)
    assert {parameter.rule for parameter in report.parameters if parameter.rule} == {
        "sample by sample"
    }
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    wrong = check(model, torch.randn(5, 4), lambda m, x: m(x).square().sum(), mode="one_by_one")
    assert "reduced by 'sum'" in wrong.failures[0]
