"""Ways to clip, the bound, and the noise that is for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import schedulers
from opacus.schedulers import LambdaNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import (
    AdaptiveBound,
    FlashDPOptimizer,
    GradSampleModuleFlashClipping,
)
from flash_clipping.finish.clipping import clipping_coefficients
from flash_clipping.ops.error_bounds import ETA
from flash_clipping.randomness import Draw, Purpose, SecretStream
from tests.support.cases import make_case, step_case
from tests.support.errors import raises
from tests.support.models import CASES
from tests.support.oracle import assert_close, per_sample_truth
from tests.support.private import SLACK, Private, Released, data as data_of_adaptive_clipping


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def data(n: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, generator=generator) * 3
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_automatic_clipping_is_auto_s(dtype: torch.dtype) -> None:
    case = CASES["mixed"]
    model, batch = make_case(case, dtype)
    truth = per_sample_truth(model, batch, case.loss)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=0.5, clipping="automatic")
    step_case(module, case, batch, "mean")
    coef = 0.5 / (truth.norms + 0.01)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    assert_close(module.get_clipping_coef(), coef, tolerance)
    for name, param in model.named_parameters():
        expected = torch.einsum("b,b...->...", coef, truth.grads[name])
        assert_close(param.grad, expected, 10 * tolerance, name)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_per_layer_clipping_against_oracle(mode: str) -> None:
    case = CASES["mixed"]
    model, batch = make_case(case, torch.float64)
    truth = per_sample_truth(model, batch, case.loss)
    bounds = [truth.param_norms[n].median().item() for n, _ in model.named_parameters()]
    module = GradSampleModuleFlashClipping(
        model, max_grad_norm=bounds, clipping="per_layer", mode=mode
    )
    step_case(module, case, batch, "mean")
    for bound, (name, param) in zip(bounds, model.named_parameters(), strict=True):
        coef = (bound / (truth.param_norms[name] + 1e-6)).clamp(max=1)
        expected = torch.einsum("b,b...->...", coef, truth.grads[name])
        assert_close(param.grad, expected, 1e-9, name)


def test_coefficients_of_bad_norms() -> None:
    norms = torch.tensor([[0.0, 2.0, math.inf, math.nan, 1e30]])
    for clipping in ("flat", "automatic"):
        coef = clipping_coefficients(norms, 1.0, clipping)
        assert torch.isfinite(coef).all()
        assert coef[2] == 0 and coef[3] == 0
    assert (clipping_coefficients(norms, 1.0) <= 1).all()
    with raises("FC320", ValueError, match="one for each trainable parameter"):
        clipping_coefficients(norms, [1.0, 2.0], "per_layer")
    with raises("FC320", ValueError, match="found 1 bounds with clipping='flat'; expected one"):
        clipping_coefficients(norms, [1.0], "flat")


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.filterwarnings("ignore::flash_clipping.randomness.SeededNoiseWarning")
def test_noise_has_the_variance_it_should(loss_reduction: str) -> None:
    """Chi-square test at 1e-6 on 200 000 draws, with and without a seed."""
    width, divisor = 100_000, 10 if loss_reduction == "mean" else 1
    for stream in (None, SecretStream(seed=5)):
        param = nn.Parameter(torch.zeros(width))
        optimizer = FlashDPOptimizer(
            torch.optim.SGD([param], lr=1.0),
            noise_multiplier=1.5,
            max_grad_norm=2.0,
            expected_batch_size=10,
            loss_reduction=loss_reduction,
            stream=stream,
        )
        draws = []
        for _ in range(2):
            optimizer.zero_grad()
            param.grad = torch.ones(width)
            optimizer.step()
            draws.append(param.grad * divisor - 1.0)
        noise = torch.cat(draws).double()
        std = 1.5 * 2.0 * (1 + ETA)
        n = noise.numel()
        z = (noise.square().sum() / std**2 - n) / math.sqrt(2 * n)
        assert abs(z) < 5
        assert abs(noise.mean()) < 5 * std / math.sqrt(n)
        assert not torch.equal(draws[0], draws[1])


@pytest.mark.parametrize("input_grad", [False, True])
def test_backward_for_all_parameters_by_name_is_backward(input_grad: bool) -> None:
    (x, y), results = next(iter(DataLoader(data(), batch_size=16))), []
    x.requires_grad_(input_grad)
    for named in (False, True):
        module = GradSampleModuleFlashClipping(network(), max_grad_norm=0.1)
        loss = F.cross_entropy(module(x), y)
        loss.backward(inputs=list(module.parameters()) if named else None)
        results.append([module.get_norm_sample(), *(p.grad for p in module.parameters())])
    for plain, by_name in zip(*results, strict=True):
        assert torch.equal(plain, by_name)


PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [0.01, 0.02, 0.03, 0.04]}


def test_noise_is_for_the_bound_that_the_sum_was_clipped_by(released: Released) -> None:
    private = Private(max_grad_norm=10.0)
    private.backward()
    private.optimizer.max_grad_norm = 0.01
    private.optimizer.step()
    assert released.releases[-1][0] == pytest.approx(10.0, rel=1e-4)
    assert released.ratio() <= SLACK  # was 1000
    private.step()  # from the next step on
    assert released.releases[-1][0] == pytest.approx(0.01, rel=1e-3)
    assert released.releases[-1][1] == pytest.approx(0.01)


@pytest.mark.parametrize("options", [{}, PER_LAYER, {"clipping": "automatic"}])
@pytest.mark.parametrize("setter", ["model", "optimizer"])
def test_model_and_optimizer_have_one_bound(
    setter: str, options: dict[str, Any], released: Released
) -> None:
    private = Private(**options)
    if setter == "optimizer":
        private.optimizer.max_grad_norm = 1e-3
    else:
        private.wrapper.max_grad_norm = [5e-4] * 4 if options == PER_LAYER else 1e-3
    private.step()
    assert private.optimizer.max_grad_norm == pytest.approx(1e-3)
    found = private.wrapper.max_grad_norm
    total = torch.tensor(found).norm().item()
    assert total == pytest.approx(1e-3)
    assert released.releases[-1][1] == pytest.approx(1e-3)
    assert released.ratio() <= SLACK


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda optimizer: schedulers.ExponentialGradClip(optimizer, gamma=0.1),
    "lambda": lambda optimizer: schedulers.LambdaGradClip(
        optimizer, scheduler_function=lambda epoch: 0.1**epoch
    ),
    "step": lambda optimizer: schedulers.StepGradClip(optimizer, step_size=1, gamma=0.1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("options", [{}, PER_LAYER])
def test_clip_schedulers_move_clipping_and_noise(
    options: dict[str, Any], name: str, released: Released
) -> None:
    """Per-layer bounds stayed as they were while the noise shrank with the schedule: 100 times."""
    private = Private(**options)
    scheduler = SCHEDULERS[name](private.optimizer)
    first = private.optimizer.max_grad_norm
    for epoch in range(3):
        private.step()
        assert released.releases[-1][1] == pytest.approx(first * 0.1**epoch)
        assert released.ratio() <= SLACK
        scheduler.step()
    if options:
        expected = [bound * 1e-3 for bound in PER_LAYER["max_grad_norm"]]  # type: ignore[attr-defined]
        assert private.optimizer.max_grad_norms == pytest.approx(expected)


NOISE_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda optimizer: schedulers.ExponentialNoise(optimizer, gamma=2.0),
    "lambda": lambda optimizer: schedulers.LambdaNoise(
        optimizer, noise_lambda=lambda epoch: 2.0**epoch
    ),
    "step": lambda optimizer: schedulers.StepNoise(optimizer, step_size=1, gamma=2.0),
}


@pytest.mark.parametrize("name", NOISE_SCHEDULERS)
@pytest.mark.parametrize("options", [{}, PER_LAYER])
def test_noise_schedulers_are_accounted_as_drawn(
    options: dict[str, Any], name: str, released: Released
) -> None:
    private = Private(**options)
    scheduler = NOISE_SCHEDULERS[name](private.optimizer)
    for _ in range(3):
        private.step()
        scheduler.step()
    drawn = [std / private.optimizer.max_grad_norm for _, std in released.releases]
    accounted = [multiplier for multiplier, *_ in private.engine.accountant.history]
    assert drawn == pytest.approx(accounted)
    assert drawn == pytest.approx([1.0, 2.0, 4.0])


@pytest.mark.parametrize("skipped", [False, True])
def test_a_step_clips_by_one_bound(skipped: bool) -> None:
    private = Private()
    private.optimizer.signal_skip_step(True)
    private.backward()
    if skipped:
        private.optimizer.step()
        private.optimizer.zero_grad()
    private.wrapper.max_grad_norm = 0.05
    text = r"max_grad_norm=0\.05, but the step .* max_grad_norm=0\.1 so far"
    with raises("FC520", match=text):
        private.backward()
    private.wrapper.clipping, private.wrapper.max_grad_norm = "automatic", 0.1
    with raises("FC520", match="clipping='automatic'"):
        private.backward()
    private.wrapper.clipping = "flat"
    private.backward(start=1)  # the step goes on


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), [0.1, -0.1], "1"])
def test_a_bound_that_bounds_nothing_is_refused(value: Any) -> None:
    private = Private()
    for holder in (private.wrapper, private.optimizer):
        with raises("FC302", ValueError, match=r"max_grad_norm: found .* in \(0, inf\)"):
            holder.max_grad_norm = value
    assert private.wrapper.max_grad_norm == private.optimizer.max_grad_norm == 0.1


ADAPTIVE: dict[str, Any] = {
    "clipping": AdaptiveBound(0.5, 1e-3, 1e3, clipbound_learning_rate=2.0),
    "max_grad_norm": 1.0,
    "batch_size": 64,
    "noise_multiplier": 0.5,
}


def private_part(multiplier: float, batch_size: float) -> float:
    """The sum's share of the noise multiplier (Andrew et al. 2021, Theorem 1)."""
    return (multiplier**-2 - (batch_size / 10) ** -2) ** -0.5


def test_the_bound_stays_within_a_logical_step(released: Released) -> None:
    """It moved with every micro-batch, and noise was for the last."""
    private = Private(**ADAPTIVE)
    bounds, largest = [], 0.0
    torch.manual_seed(1)
    with BatchMemoryManager(
        data_loader=private.loader, max_physical_batch_size=8, optimizer=private.optimizer
    ) as loader:
        for x, _ in loader:
            private.optimizer.zero_grad()
            (100 * private.model(x).square().sum(1).mean()).backward()
            norms = private.wrapper.get_norm_sample()
            coef = private.wrapper.get_clipping_coef()
            bounds.append(private.wrapper.max_grad_norm)
            largest = max(largest, (norms * coef).max().item())
            private.optimizer.step()
    assert len(bounds) == 8 and set(bounds) == {1.0}
    assert private.optimizer.max_grad_norm != 1.0  # afterwards
    std = released.releases[-1][1]
    # How far one sample moves the sum, in units of what the noise is for.
    assert largest * private_part(0.5, 64) / std <= SLACK
    assert std == pytest.approx(private_part(0.5, 64) * 1.0)


@pytest.mark.parametrize("multiplier", [0.5, 2.0])
@pytest.mark.parametrize("parts", [1, 4])
def test_sum_and_count_cost_what_is_accounted(
    multiplier: float,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
    released: Released,
) -> None:
    """One count over the whole logical batch, by the expected size: the drawn one is private."""
    import flash_clipping.engine.optimizer

    stds: list[float] = []
    of_sums = flash_clipping.engine.optimizer.noisy_means

    def noise(sums: list[torch.Tensor], std: float, *args: Any, draw: Draw, **options: Any) -> Any:
        if draw.purpose != Purpose.COUNT:
            return of_sums(sums, std, *args, draw=draw, **options)
        stds.append(std)
        assert sums[0].dtype == torch.float64 and args == (1.0,)
        return [sums[0] + 2.0]

    monkeypatch.setattr(flash_clipping.engine.optimizer, "noisy_means", noise)
    private = Private(**{**ADAPTIVE, "noise_multiplier": multiplier})
    drawn = 40  # of an expected 64
    for part in range(parts):
        private.optimizer.signal_skip_step(part < parts - 1)
        private.optimizer.zero_grad()
        x = data_of_adaptive_clipping().tensors[0][
            part * drawn // parts : (part + 1) * drawn // parts
        ]
        scale = torch.where(torch.arange(len(x)) % 2 == 0, 100.0, 1e-12)  # half are clipped
        (scale * private.model(x).square().sum(1)).mean().backward()
        private.optimizer.step()
    assert stds == [64 / 20]
    fraction = 0.5 + 2.0 / 64  # centred: 20 of 40 count +1/2, and 2 are noise
    expected = math.exp(-2.0 * (fraction - 0.5))
    assert private.optimizer.max_grad_norm == pytest.approx(expected)
    assert private.wrapper.max_grad_norm == private.optimizer.max_grad_norm
    (_, std) = released.releases[-1]
    of_sum, of_count = std / 1.0, 2 * stds[0]
    assert (of_sum**-2 + of_count**-2) ** -0.5 == pytest.approx(multiplier)
    assert private.engine.accountant.history == [(multiplier, pytest.approx(1.0), 1)]


def test_a_noise_scheduler_is_followed(released: Released) -> None:
    """1.01 was drawn while 8 was accounted."""
    moving = AdaptiveBound(min_clipbound=1e-3, max_clipbound=1.0)
    private = Private(**ADAPTIVE | {"clipping": moving, "noise_multiplier": 1.0})
    scheduler = LambdaNoise(private.optimizer, noise_lambda=lambda epoch: [1, 2, 5][epoch])
    for _ in range(3):
        bound = private.optimizer.max_grad_norm
        private.step(samples=64)
        drawn = released.releases[-1][1] / bound
        accounted = private.engine.accountant.history[-1][0]
        assert drawn == pytest.approx(private_part(accounted, 64))
        assert drawn >= accounted
        if len(released.releases) < 3:
            scheduler.step()
    private.optimizer.noise_multiplier = 8.0  # more than 64 / 10
    private.optimizer.zero_grad()
    private.backward(samples=64)
    with raises("FC321", match=r"expected more than 80 samples"):
        private.optimizer.step()


def test_error_settings() -> None:
    with raises("FC321", ValueError, match="expected min_clipbound <= max_clipbound"):
        AdaptiveBound(min_clipbound=2.0, max_clipbound=1.0)
