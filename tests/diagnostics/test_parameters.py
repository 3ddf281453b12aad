"""Which parameters a rule serves, and by which route a layer goes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import Kernels
from flash_clipping.__main__ import main
from flash_clipping.diagnostics import CheckReport, check, environment
from flash_clipping.layers import MixtureOfExperts, RoutedExperts, TopKRouter
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


E, D = 4, 6


class Router(TopKRouter):
    """Of each token alone."""

    def __init__(self) -> None:
        super().__init__(D, E, 2)


class Capacity(Router):
    """Tokens that come when an expert has as many as it takes are dropped."""

    def __init__(self, places: int):
        super().__init__()
        self.places = places

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        ids, weights = super().forward(x)
        chosen = nn.functional.one_hot(ids.flatten(), E)
        before = (chosen.cumsum(0) * chosen).sum(1) - 1
        return ids.masked_fill((before >= self.places).view_as(ids), -1), weights


class ExpertsChoose(Router):
    """Each expert takes the tokens of the batch that want it most."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        scores = self.linear(x).softmax(-1)
        tokens = scores.flatten(0, 1)
        taken = torch.zeros_like(tokens, dtype=torch.bool)
        taken = taken.scatter(0, tokens.topk(len(tokens) // 3, 0).indices, True).view_as(scores)
        return torch.where(taken, torch.arange(E), -1), scores


class Loads(Router):
    """A bias is updated from the loads of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(E))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        probabilities = self.linear(x).softmax(-1)
        ids = (probabilities + self.bias).topk(2).indices
        if self.training:
            loads = nn.functional.one_hot(ids, E).sum((0, 1, 2))
            self.bias += 0.01 * (loads.double().mean() - loads).sign()
        return ids, probabilities.gather(-1, ids)


def mixture(router: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), RoutedExperts(router, MixtureOfExperts(D, 5, E)))
    for param in model.parameters():
        nn.init.normal_(param, std=0.7)
    return model


def checked(model: nn.Module, loss: Any = None, **options: Any) -> CheckReport:
    torch.manual_seed(1)
    return check(model, torch.randn(5, 7, D), loss, strict=False, **options)


@pytest.mark.parametrize("router", [Capacity(8), ExpertsChoose()])
def test_routes_that_depend_on_other_samples(router: nn.Module) -> None:
    report = checked(mixture(router))
    assert "outputs of a sample change with the others in its batch" in report.failures[-1]


def test_a_capacity_that_this_batch_does_not_fill() -> None:
    """In as many copies of one sample it is full."""
    report = checked(mixture(Capacity(36)))
    assert len(report.failures) == 1 and "20 copies of sample 0" in report.failures[0]
    assert checked(mixture(Capacity(20 * 7 * 2))).passed


def test_a_bias_that_follows_the_loads() -> None:
    report = check(mixture(Loads()), torch.randn(5, 7, D))
    assert any("FC130 1.router" in failure for failure in report.failures), report.failures
    assert not checked(mixture(Loads())).passed  # the samples of a batch share its bias
    assert checked(mixture(Loads()).eval()).passed


def test_the_aux_loss_of_transformers() -> None:
    """At such a weight no norm tells."""
    pytest.importorskip("transformers")
    from tests.support.mixtures import mixture, tokens

    def own_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        (ids,) = batch
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    def weighted(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        output = model(input_ids=batch[0], use_cache=False)
        return output.logits.square().flatten(1).mean(1) + 1e-7 * output.aux_loss

    def of_logits(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        logits = model(input_ids=batch[0], use_cache=False).logits
        return logits.square().flatten(1).mean(1)

    torch.manual_seed(1)
    model, batch = mixture("Mixtral").float(), tokens(3, 5)
    model.config.output_router_logits = True
    model.router_aux_loss_coef = 1e-7
    assert check(model, batch, of_logits, removals=1).passed  # without it
    report = check(model, batch, own_loss, removals=1)
    assert "its own loss holds an aux_loss" in report.failures[0]
    found = check(model, batch, weighted, removals=1).failures[-1]
    assert "changes with the others in its batch" in found
    model.router_aux_loss_coef = 0.0
    assert check(model, batch, own_loss, removals=1).passed


def test_environment_report(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_CLIPPING_BACKEND", "torch")
    monkeypatch.setenv("SOME_TOKEN", "not to be printed")
    report = environment()
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["opacus"] and report["versions"]["flash-clipping"]
    assert {"dp-accounting", "peft", "trl", "diffusers", "torchao"} <= {*report["versions"]}
    assert report["variables"]["FLASH_CLIPPING_BACKEND"] == "torch"
    assert report["triton"]["available"] == backends.is_triton_available()
    assert report["triton"]["available"] or report["triton"]["why_not"]
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text and '"FLASH_CLIPPING_BACKEND": "torch"' in text
    assert "not to be printed" not in text
    assert json.loads(text)["versions"] == report["versions"]


def test_environment_says_why_there_is_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_import_error", lambda: "ImportError: no such thing")
    assert environment()["triton"] == {
        "available": False,
        "interpreting": backends.is_interpreting(),
        "why_not": "ImportError: no such thing",
    }
