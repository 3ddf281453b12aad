"""``check`` on models, rules and losses that are wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import (
    GradSampleModuleFlashClipping,
    LinearGrad,
    register_rule,
)
from flash_clipping.diagnostics import BadBatchError, check
from flash_clipping.rules.linear import LinearRule
from tests.capture.proof.mixers import RIGHT, SEEN_BY_CHECK, Around, B, K, T
from tests.support.diagnosed import QKV, Fused, of, statuses
from tests.support.errors import raises
from tests.support.factors import Own


def test_a_rule_with_a_wrong_norm_fails(own_rules: None) -> None:
    @register_rule(QKV)
    class Faulty(LinearRule):
        def backward(self, layer, saved, grad_output, needs):
            grad_input, factors = super().backward(layer, saved, grad_output, needs)
            A, G = saved[0], grad_output
            return grad_input, {**factors, "weight": LinearGrad(A, G * 1.001)}

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
                outer = LinearGrad(saved[0][:, 0], grad_output[:, 0])
            else:
                outer = LinearGrad(saved[0], grad_output.unsqueeze(1))
            return grad_input, {**factors, "weight": outer}

    module = GradSampleModuleFlashClipping(Fused(), max_grad_norm=1.0)
    with raises("FC162", match=r"qkv \(QKV\)"):
        module(torch.randn(5, 3, 4)).sum().backward()


def test_a_rule_with_a_right_norm_and_a_wrong_sum_fails(own_rules: None) -> None:
    class Flipped(Own):
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
    assert not report.passed and report.parameters == ()
    assert "1 (BatchNorm1d)" in report.failures[0]
    report = check(model, torch.randn(5, 4), strict=False)
    assert "mixes samples" in report.failures[0] and "GroupNorm" in report.failures[0]


class Centre(nn.Module):
    """Mixes samples, and has no parameter for a rule to look at."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_a_layer_that_mixes_samples_is_caught() -> None:
    model = nn.Sequential(nn.Linear(4, 6), Centre(), nn.Tanh(), nn.Linear(6, 2))
    report = check(model, torch.randn(5, 4))
    assert not report.passed and "3 (Linear)" in report.failures[0]
    assert any("depend on other samples" in failure for failure in report.failures)
    without = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    assert check(without, torch.randn(5, 4)).passed


def test_a_scale_that_this_batch_does_not_need_is_caught() -> None:
    """By the proof before a first step of training, which makes a sample extreme, too."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.abs().max().clamp(min=5.0)

    report = check(nn.Sequential(nn.Linear(4, 2), Scaled()), torch.randn(5, 4))
    beside, failure = report.failures
    assert "outputs of a sample change with the others in its batch" in failure
    assert "Where the values of sample 0 are extreme" in beside
    assert all(status == "PASS" for status in statuses(report).values())


def test_a_mixing_layer_that_one_sample_at_a_time_changes_is_caught() -> None:
    class OwnBatchNorm(nn.Module):
        """One sample alone is something else."""

        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh((x - x.mean(0)) * self.gain + 0.1)

    last = nn.Sequential(nn.Linear(4, 6), OwnBatchNorm())
    report = check(last, torch.randn(5, 4))
    assert not report.passed
    text = " ".join(report.failures)
    assert "1 (OwnBatchNorm)" in text and "a mean or a scale over the batch" in text
    report = check(last.append(nn.Linear(6, 2)), torch.randn(5, 4))
    assert not report.passed
    assert "2 (Linear)" in report.failures[0]
    assert "other values for the same samples" in report.failures[0]


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

    equal = check(Head(), (x, y), mean_over_tokens)  # harmless, if it is always so
    assert equal.passed and any("half of one sample's labels" in note for note in equal.notes)
    as_short = y.clone()
    as_short[:, -1] = -1
    report = check(Head(), (x, as_short), mean_over_tokens)
    assert any("per_sample_loss(logits, labels)" in failure for failure in report.failures)
    for sample in range(5):
        y[sample, : sample + 1] = -1  # unequal lengths
    report = check(Head(), (x, y), mean_over_tokens)
    assert not report.passed
    assert any("how many tokens" in failure for failure in report.failures)

    def mean_over_own_tokens(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        losses = F.cross_entropy(model(x).mT, y, ignore_index=-1, reduction="none")
        return losses.sum(1) / (y != -1).sum(1)

    for labels in (y, as_short):
        report = check(Head(), (x, labels), mean_over_own_tokens)
        assert report.passed and not any("labels" in note for note in report.notes)


@pytest.mark.parametrize(("actual", "declared"), [("sum", "mean"), ("mean", "sum")])
def test_a_wrong_reduction_is_named(actual: str, declared: str) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        losses = model(batch).square().sum(1)
        return losses.sum() if actual == "sum" else losses.mean()

    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    report = check(model, x, loss, loss_reduction=declared)
    (failure,) = report.failures  # all that differs has this cause
    assert f"reduced by '{actual}', but loss_reduction is '{declared}'" in failure
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
    (refused,) = report.failures
    assert "buffer 'mean' is changed" in refused
    assert check(model, torch.randn(5, 4), strict=False).passed  # as the user says
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
    assert report.passed
    assert any("at least two" in note for note in report.notes)


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
    with raises("FC462|FC922", BadBatchError, match=message):
        check(nn.Linear(4, 3), batch, loss)


def test_wrapped_models_are_refused() -> None:
    with raises("FC923", TypeError, match="wrapped already"):
        check(GradSampleModuleFlashClipping(nn.Linear(4, 3)), torch.randn(5, 4))
    with raises("FC923", TypeError):
        check(nn.Linear(4, 3), torch.randn(5, 4), clipping="per_layer")


@pytest.mark.parametrize("name", SEEN_BY_CHECK)
def test_what_the_look_before_a_first_step_does_not_see(name: str) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        """Gradients of samples have several signs."""
        return model(x).flatten(1).sum(1) * x.flatten(1).sum(1)

    torch.manual_seed(0)
    model, x = Around(SEEN_BY_CHECK[name]).eval(), torch.randn(B, T, K)
    report = check(model, x, loss if "hook" in name else None, strict=False)
    found = {
        "order by values": "Where the values of sample 0 are extreme (norms change by",
        "divided by the size": "Without sample 0 (norms change by",
    }
    expected = found.get(name, "parameters differ from the oracle")
    assert any(expected in failure for failure in report.failures), report


@pytest.mark.parametrize("name", ["plain", "flat", "dropout where large", "alpha dropout"])
def test_a_model_beside_an_extreme_sample(name: str) -> None:
    torch.manual_seed(0)
    report = check(Around(RIGHT[name]).eval(), torch.randn(B, T, K), strict=False)
    assert not any("extreme" in failure for failure in report.failures), report
