"""Ways to clip, and the optimizer that must add noise for the bound that was clipped by."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.schedulers import ExponentialGradClip
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flash_clipping.engine.optimizer
from flash_clipping import (
    AdaptiveBound,
    FlashDPOptimizer,
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
)
from flash_clipping.finish.clipping import clipping_coefficients
from flash_clipping.ops.error_bounds import ETA
from flash_clipping.randomness import Draw, Purpose, SecretStream
from tests.support.cases import make_case, step_case
from tests.support.errors import raises
from tests.support.models import CASES
from tests.support.oracle import assert_close, per_sample_truth


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def data(n: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, generator=generator) * 3
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def private(engine: PrivacyEngine, model: nn.Module, **options: Any) -> tuple[Any, ...]:
    options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "poisson_sampling": False} | options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=16)
    return engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        criterion=nn.CrossEntropyLoss(),
        **options,
    )


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


def train(parts: tuple[Any, ...], steps: int = 4) -> None:
    model, optimizer, *_, loader = parts
    for x, y in list(loader)[:steps]:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_per_layer_clipping_equals_opacus_hooks() -> None:
    ours, theirs = network(), network()
    bounds = [0.05 * (i + 1) for i, _ in enumerate(ours.parameters())]
    options = {"clipping": "per_layer", "max_grad_norm": bounds}
    parts = private(FlashPrivacyEngine(), ours, **options)
    train(parts)
    reference = private(PrivacyEngine(), theirs, **options)
    train(reference)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), 1e-6)
    assert parts[1].max_grad_norm == pytest.approx(math.hypot(*bounds), rel=1e-6)
    assert reference[1].max_grad_norm == pytest.approx(parts[1].max_grad_norm, rel=1e-6)


def test_a_scheduler_moves_both_the_noise_and_the_clipping() -> None:
    model, optimizer, criterion, loader = private(FlashPrivacyEngine(), network())
    scheduler = ExponentialGradClip(optimizer, gamma=0.5)
    for x, y in list(loader)[:3]:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        assert model.max_grad_norm == optimizer.max_grad_norm
        sums = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert sums.norm() <= 16 * optimizer.max_grad_norm
        optimizer.step()
        scheduler.step()
    assert optimizer.max_grad_norm == pytest.approx(0.125)
    assert model.max_grad_norm == optimizer.max_grad_norm


def test_adaptive_clipping_equals_opacus_two_pass_criterion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bounds are those that Opacus' criterion reaches on the same norms, one step later: it
    moves the bound before it clips, which several backward passes in a step cannot do."""
    from opacus.utils.adaptive_clipping.adaptive_clipping_utils import (
        PrivacyEngineAdaptiveClipping,
    )

    normal, draws = torch.normal, iter([0.3, -1.2, 0.7, 0.1] * 2)

    def of_count(*args: Any, **kwargs: Any) -> Tensor:
        """The same noise on the counts of both."""
        if kwargs.get("size") in ((1,), torch.Size((1,))):
            return torch.full((1,), next(draws) * kwargs["std"])
        return normal(*args, **kwargs)

    of_sums = flash_clipping.engine.optimizer.noisy_means

    def of_our_count(sums: list[Tensor], std: float, *args: Any, draw: Draw, **kw: Any) -> Any:
        if draw.purpose == Purpose.COUNT:
            return [sums[0] + next(draws) * std]
        return of_sums(sums, std, *args, draw=draw, **kw)

    options = {
        "noise_multiplier": 1.0,
        "target_unclipped_quantile": 0.5,
        "min_clipbound": 1e-3,
        "max_clipbound": 1e3,
        "clipbound_learning_rate": 0.5,
    }
    adaptive = {
        "noise_multiplier": options.pop("noise_multiplier"),
        "clipping": AdaptiveBound(**options),
    }
    flash = private(FlashPrivacyEngine(), network(), **adaptive)
    ghost = private(PrivacyEngineAdaptiveClipping(), network(), grad_sample_mode="ghost", **options)
    monkeypatch.setattr(torch, "normal", of_count)
    monkeypatch.setattr(flash_clipping.engine.optimizer, "noisy_means", of_our_count)
    bounds = []
    for model, optimizer, criterion, loader in (flash, ghost):
        optimizer.param_groups[0]["lr"] = 0.0
        found = []
        for x, y in list(loader)[:4]:
            optimizer.zero_grad()
            criterion.criterion.reduction = "none" if model is ghost[0] else "mean"
            criterion(model(x), y).backward()
            criterion.criterion.reduction = "mean"
            if model is flash[0]:
                assert optimizer._multiplier() > optimizer.noise_multiplier
                optimizer.step()
            found.append(optimizer.max_grad_norm)
            assert model.max_grad_norm == optimizer.max_grad_norm
        bounds.append(found)
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-5)
    assert len(set(bounds[0])) == 4


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


@pytest.mark.filterwarnings("ignore::flash_clipping.randomness.SeededNoiseWarning")
def test_noise_has_the_variance_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    """Chi-square test at 1e-6 on 200 000 draws, with and without a seed."""
    width = 100_000
    for stream in (None, SecretStream(seed=5)):
        param = nn.Parameter(torch.zeros(width))
        optimizer = FlashDPOptimizer(
            torch.optim.SGD([param], lr=1.0),
            noise_multiplier=1.5,
            max_grad_norm=2.0,
            expected_batch_size=10,
            stream=stream,
        )
        draws = []
        for _ in range(2):
            optimizer.zero_grad()
            param.grad = torch.ones(width)
            optimizer.step()
            draws.append(param.grad * 10 - 1.0)
        noise = torch.cat(draws).double()
        std = 1.5 * 2.0 * (1 + ETA)
        n = noise.numel()
        z = (noise.square().sum() / std**2 - n) / math.sqrt(2 * n)
        assert abs(z) < 5
        assert abs(noise.mean()) < 5 * std / math.sqrt(n)
        assert not torch.equal(draws[0], draws[1])


def test_optimizer_steps_as_opacus_does() -> None:
    """Virtual steps, refusal to use a gradient twice, and no noise: Opacus' own arithmetic."""
    from opacus.optimizers import DPOptimizerFastGradientClipping

    results = []
    for cls in (FlashDPOptimizer, DPOptimizerFastGradientClipping):
        model = copy.deepcopy(network())
        optimizer = cls(
            torch.optim.AdamW(model.parameters(), lr=0.1),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            expected_batch_size=4,
        )
        generator = torch.Generator().manual_seed(0)
        for skip in (True, True, False, False):
            optimizer.signal_skip_step(skip)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*results, strict=True):
        assert_close(p, q, 1e-6)


def test_step_without_backward_is_refused() -> None:
    _, optimizer, _, _ = private(FlashPrivacyEngine(), network())
    with raises("FC501", ValueError):
        optimizer.step()


def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_step_on_gradients_that_were_not_clipped_is_refused() -> None:
    module, optimizer, _, loader = private(FlashPrivacyEngine(), network())
    x, y = next(iter(loader))
    module.disable_hooks()
    F.cross_entropy(module(x), y).backward()
    with raises("FC501", ValueError):
        optimizer.step()


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


def test_a_part_of_the_gradients_with_hooks_disabled_in_between_is_autograds() -> None:
    module, plain = GradSampleModuleFlashClipping(network(), max_grad_norm=0.1), network()
    x, y = next(iter(DataLoader(data(), batch_size=16)))
    x.requires_grad_()
    loss, expected = F.cross_entropy(module(x), y), F.cross_entropy(plain(x), y)
    module.disable_hooks()
    params, plain_params = list(module.parameters()), list(plain.parameters())
    for leaf, plain_leaf in zip([x, *params], [x, *plain_params], strict=True):
        (grad,) = torch.autograd.grad(loss, [leaf], retain_graph=True)
        (truth,) = torch.autograd.grad(expected, [plain_leaf], retain_graph=True)
        assert_close(grad, truth, 1e-6)
    loss.backward(inputs=[x], retain_graph=True)
    assert all(p.grad is None for p in params)
    loss.backward(inputs=[params[-1]])
    assert [p.grad is None for p in params] == [True] * (len(params) - 1) + [False]


def test_engine_serves_torch_attention_as_it_is() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x[:, None] * torch.ones(1, 4, 1)
            return self.head(self.attention(x, x, x)[0].mean(1))

    module, optimizer, criterion, loader = private(FlashPrivacyEngine(), Pooled())
    x, y = next(iter(loader))
    criterion(module(x), y).backward()
    optimizer.step()
    with pytest.raises(UnsupportedModuleError):
        PrivacyEngine().validate(module=Pooled(), optimizer=None, data_loader=None)
