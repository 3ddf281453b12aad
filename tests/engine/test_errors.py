"""Errors: each says what was found and what to do."""

from __future__ import annotations

import copy
import pickle
import re
import traceback
from typing import Any

import pytest
import torch
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, nn

from flash_clipping import (
    AdaptiveBound,
    FlashClippingError,
    FlashLoss,
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
    codes,
)
from flash_clipping.errors import (
    FlashClippingWarning,
    InvalidType,
    InvalidValue,
    NotServed,
    warn,
)
from tests.support.engine import EngineTraining, assert_states_close, convolutional_network
from tests.support.errors import raises
from tests.support.wrapping import MODES


def wrapped(model: nn.Module, **options: Any) -> GradSampleModuleFlashClipping:
    return GradSampleModuleFlashClipping(model, **options)


def test_error_norms_before_backward() -> None:
    module = wrapped(nn.Linear(4, 2))
    text = "no per-sample norms yet: they are taken during backward"
    for ask in (module.get_norm_sample, module.get_clipping_coef):
        with raises("FC525", match=text):
            ask()
    module(torch.randn(3, 4))
    with raises("FC525", match=text):
        module.get_norm_sample()


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (FlashClippingError, RuntimeError),
        (InvalidValue, ValueError),
        (InvalidType, TypeError),
        (NotServed, NotImplementedError),
    ],
)
def test_errors_name_their_code_and_the_command_once(
    kind: type[Exception], base: type[Exception]
) -> None:
    error = kind("FC303 found nothing; expected something.")
    shown = traceback.format_exception(pickle.loads(pickle.dumps(error)))
    assert isinstance(error, base) and str(error) == "FC303 found nothing; expected something."
    (code,) = re.findall(r"flash-clipping errors (FC\d+)", "".join(shown))
    assert codes.entry(code).code == error.code == code


def test_errors_reach_another_process() -> None:
    module = wrapped(nn.EmbeddingBag(5, 3, mode="max"))
    with raises("FC117") as caught:
        module(torch.zeros(3, 4).long())
    there = pickle.loads(pickle.dumps(caught.value))
    assert type(there) is type(caught.value)
    assert (str(there), there.__notes__) == (str(caught.value), caught.value.__notes__)


@pytest.mark.parametrize("mode", MODES)
def test_error_layers_disagree_about_the_batch(mode: str) -> None:
    """Without a tensor input of the root there is nothing else to compare with."""

    class NoInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self) -> Tensor:
            return self.second(self.first(torch.ones(6, 4)).view(3, 2, 4))

    module = wrapped(NoInput(), mode=mode)
    output = module()
    with raises(
        "FC201",
        match=r"first \(Linear\): found 6 samples along the batch axis, but second \(Linear\) "
        r"recorded 3 in the same backward",
    ):
        output.flatten(1).sum(1).mean().backward()


def test_error_parameters_on_another_device() -> None:
    """Who forgot to move the batch is told to move the batch."""
    module = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    with raises(
        "FC205",
        match=r'0 \(Linear\).*cpu.*meta\. Move the batch to the model:\n    x = x\.to\("cpu"\)',
    ):
        module(torch.randn(3, 4, device="meta"))
    module._module[1].to("meta")
    with raises("FC205", match=r"(?s)1 \(Linear\).*meta.*cpu\. .*to_empty"):
        module(torch.randn(3, 4))


def test_error_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    with raises("FC101", NotImplementedError, match=r"(?s)1 \(BatchNorm2d.*GroupNorm"):
        wrapped(model, strict=False)
    with raises("FC101", NotImplementedError, match=r"1 \(BatchNorm2d"):
        wrapped(model)  # already before a forward has shown it
    with raises("FC101", UnsupportedModuleError, match="BatchNorm"):
        EngineTraining(FlashPrivacyEngine(), model=model)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize(
    ("layer", "x", "text"),
    [
        (
            nn.Embedding(5, 4, scale_grad_by_freq=True),
            torch.zeros(3, 2, dtype=torch.long),
            r"body\.0 \(Embedding\): .*mixes samples.* Set scale_grad_by_freq=False",
        ),
        (
            nn.EmbeddingBag(5, 4, mode="max"),
            torch.zeros(3, 2, dtype=torch.long),
            r"body\.0 \(EmbeddingBag\): .*mode='max'.* expected mode 'sum' or 'mean'",
        ),
        (
            nn.Conv2d(2, 4, 3),
            torch.zeros(2, 5, 5),
            r"body\.0 \(Conv2d\): .*expected an input of 4 dimensions, found shape \(2, 5, 5\).*"
            r"unsqueeze\(0\)",
        ),
    ],
    ids=["scale_grad_by_freq", "bag_max", "convolution"],
)
def test_error_of_a_rule_names_the_layer(layer: nn.Module, x: Tensor, text: str, mode: str) -> None:
    model = nn.ModuleDict({"body": nn.Sequential(copy.deepcopy(layer))})
    model.forward = lambda x: model["body"](x)  # type: ignore[method-assign]
    with raises("FC102|FC117|FC203", ValueError, match=text):
        wrapped(model, mode=mode)(x)


def test_error_input_without_a_batch_axis() -> None:
    module = wrapped(nn.Sequential(nn.Linear(4, 2)), batch_first=False)
    with raises(
        "FC203",
        match=r"0 \(Linear\): found an input of shape \(4,\), which has no batch axis; expected "
        r"\[batch, \.\.\.\]\. Add the axis with unsqueeze",
    ):
        module(torch.randn(4))


def test_error_reductions_do_not_match() -> None:
    module = wrapped(nn.Linear(4, 2), loss_reduction="mean")
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
        loss_reduction="mean",
    )
    text = r"The loss reductions do not match: .*criterion\.reduction='sum'.*'mean' or 'sum'"
    with raises("FC461", ValueError, match=text):
        FlashLoss(module, optimizer, nn.CrossEntropyLoss(reduction="sum"))
    with raises("FC461", ValueError, match=r"module\.loss_reduction='mean'"):
        FlashLoss(module, optimizer, nn.CrossEntropyLoss(), "sum")


def test_warnings_are_of_the_line_that_is_asked_for() -> None:
    with pytest.warns(FlashClippingWarning) as found:
        warn("FC555 Odd. Look for it.", stacklevel=1)
    assert found[0].filename == __file__
    assert str(found[0].message) == "FC555 Odd.\nLook for it."


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (
            {"mode": "three_pass"},
            "mode='three_pass' is unknown; expected one of one_pass, two_pass",
        ),
        (
            {"clipping": "adaptive!"},
            "clipping='adaptive!' is unknown; expected one of flat, per_layer, automatic",
        ),
        ({"loss_reduction": "none"}, "loss_reduction='none' is unknown; expected one of mean, sum"),
        ({"mode": AdaptiveBound()}, r"mode=AdaptiveBound\(.*\) is unknown; expected one of one_"),
        ({"loss_reduction": AdaptiveBound()}, r"loss_reduction=AdaptiveBound\(.*\) is unknown"),
    ],
)
def test_error_unknown_option(option: dict[str, Any], text: str) -> None:
    with raises("FC301", ValueError, match=text):
        wrapped(nn.Linear(4, 2), **option)


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_error_grad_scaler(make_optimizer: Any, unscale_first: bool) -> None:
    """Norms and bounds would be those of scaled gradients: refused before any parameter moves."""
    training = EngineTraining(FlashPrivacyEngine(), make_optimizer, poisson_sampling=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = next(iter(training.loader))
    before = [p.detach().clone() for p in training.plain.parameters()]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(training.model(x), y)
    scaler.scale(loss).backward()
    call = scaler.unscale_ if unscale_first else scaler.step
    with raises("FC470", ValueError):
        call(training.optimizer)
    for was, param in zip(before, training.plain.parameters(), strict=True):
        assert torch.equal(was, param)


def test_disabled_grad_scaler_is_none() -> None:
    """Mixed-precision loops pass ``enabled=False`` where they do not scale."""
    found = EngineTraining(FlashPrivacyEngine(), poisson_sampling=False)
    expected = EngineTraining(FlashPrivacyEngine(), poisson_sampling=False)
    x, y = next(iter(found.loader))
    expected.step(x, y)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    found.optimizer.zero_grad()
    scaler.scale(found.criterion(found.model(x), y)).backward()
    scaler.unscale_(found.optimizer)
    scaler.step(found.optimizer)
    scaler.update()
    assert_states_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp16_autocast_without_a_scaler(dtype: torch.dtype) -> None:
    """Norms and sums are those of the gradients that autocast gives."""
    training = EngineTraining(FlashPrivacyEngine(), poisson_sampling=False, max_grad_norm=0.5)
    x, y = next(iter(training.loader))
    x, y = x[:16], y[:16]
    plain = convolutional_network()
    rows = []
    for b in range(len(x)):
        plain.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = nn.functional.cross_entropy(plain(x[b : b + 1]), y[b : b + 1])
        loss.backward()
        rows.append(torch.cat([p.grad.flatten() for p in plain.parameters()]).double())
    truth = torch.stack(rows)
    with torch.autocast("cpu", dtype=dtype):
        loss = nn.functional.cross_entropy(training.model(x), y)
    loss.backward()
    norms = training.wrapper.get_norm_sample().double()
    tolerance = 8 * torch.finfo(dtype).eps
    assert ((norms - truth.norm(dim=1)).abs() <= tolerance * truth.norm(dim=1)).all()
    coef = (0.5 / truth.norm(dim=1)).clamp(max=1)
    clipped = (coef[:, None] * truth).sum(0)
    sums = torch.cat([p.grad.flatten() for p in training.plain.parameters()]).double()
    assert (sums - clipped).norm() <= tolerance * clipped.norm()


@pytest.mark.parametrize("mode", MODES)
def test_error_gradient_that_bypasses_a_tap(mode: str) -> None:
    module = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), mode=mode)
    penalty = 0.1 * module._module[0].weight.square().sum()
    loss = module(torch.randn(3, 4)).square().sum(1).mean() + penalty
    with raises("FC142", match=r"0\.weight.*added without being clipped\. .*weight_decay"):
        loss.backward()


def test_error_wrapped_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    module = wrapped(model)
    with raises("FC172", ValueError):
        wrapped(model)
    with raises("FC173", ValueError, match="'mean'.*'sum'"):
        EngineTraining(FlashPrivacyEngine(), model=module, loss_reduction="sum")


def test_error_second_backward_in_two_passes() -> None:
    module = wrapped(nn.Linear(4, 2), mode="two_pass")
    loss = module(torch.randn(3, 4)).square().sum(1).mean()
    loss.backward(retain_graph=True)
    with raises("FC413"):
        loss.backward()
