"""``check`` on mixtures of experts that mix samples, each in a way of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping.diagnostics import CheckReport, check
from flash_clipping.layers import MixtureOfExperts, RoutedExperts, TopKRouter

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


def test_tokens_that_are_routed_alone_pass() -> None:
    report = checked(mixture(Router()))
    assert report.passed, str(report)


def test_integers_may_change_where_outputs_do_not() -> None:
    """Rows are put in the order of their experts, and back."""

    class Order(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return ids.flatten().argsort()

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.order = mixture(Router()), Order()

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            order = self.order(y.argmax(-1))
            rows = y.flatten(0, 1)
            return torch.empty_like(rows).index_copy(0, order, rows[order]).view_as(y)

    report = checked(Sorted())
    assert report.passed, str(report)


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
    report = checked(mixture(Loads()))
    assert any("buffers: 1.router.bias" in failure for failure in report.failures)
    assert checked(mixture(Loads()).eval()).passed


def test_balancing() -> None:
    class Balanced(nn.Module):
        def __init__(self, whole_batch: bool):
            super().__init__()
            self.body = mixture(TopKRouter(D, E, 2, balance="sample"))
            self.whole_batch = whole_batch

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y, loss_B = self.body(x)
            if self.whole_batch:
                probabilities = self.body[1].router.linear(self.body[0](x)).softmax(-1)
                loads = nn.functional.one_hot(probabilities.argmax(-1), E).double().mean((0, 1))
                loss_B = E * (loads * probabilities.mean((0, 1))).sum()
            return y, loss_B

    def loss(model: Any, x: Tensor) -> Tensor:
        y, balance = model(x)
        return y.square().flatten(1).mean(1) + 10 * balance

    assert checked(Balanced(False), loss).passed
    report = checked(Balanced(True), loss)
    assert any("samples' own losses" in failure for failure in report.failures)


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
