"""A user's training script, as type checkers see it (mypy, in CI); it is not run.

Every line with ``type: ignore`` is a mistake that a checker must find.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flash_clipping
from flash_clipping import (
    FlashDPOptimizer,
    FlashLoss,
    FlashPrivacyEngine,
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[Tensor, ...]]]:
    model = nn.Linear(4, 2)
    dataset = TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(dataset, batch_size=8)


def train() -> float:
    model, optimizer, loader = parts()
    engine = FlashPrivacyEngine()
    private, dp_optimizer, criterion, batches = engine.make_private(
        module=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        mode="two_pass",
    )
    wrapped: GradSampleModuleFlashClipping = private
    stepping: FlashDPOptimizer = dp_optimizer
    for x, y in batches:
        stepping.zero_grad()
        loss = criterion(wrapped(x), y)
        loss.backward()
        norms: Tensor = private.get_norm_sample()
        stepping.step()
    return engine.get_epsilon(1e-5) + float(norms.max())


def with_epsilon() -> None:
    model, optimizer, loader = parts()
    hooks, dp_optimizer, _ = FlashPrivacyEngine(accountant="rdp").make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=8.0,
        target_delta=1e-5,
        epochs=1,
        max_grad_norm=[1.0, 1.0],
        clipping="per_layer",
        wrap_model=False,
    )
    only_hooks: GradSampleHooksFlashClipping = hooks
    model, optimizer, loader = parts()
    module, stepping, loss, _ = FlashPrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        target_epsilon=8.0,
        target_delta=1e-5,
        epochs=1,
        max_grad_norm=1.0,
    )
    both: tuple[GradSampleModuleFlashClipping, FlashDPOptimizer] = module, stepping
    of_samples: FlashLoss = loss
    assert both and of_samples
    only_hooks.remove_hooks()
    dp_optimizer.max_grad_norm = 0.5


def mistakes() -> None:
    model, optimizer, loader = parts()
    engine = FlashPrivacyEngine()
    engine.make_private(  # type: ignore[call-overload]
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        mode="onepass",
    )
    engine.make_private(  # type: ignore[call-overload]
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=8,
    )
    engine.make_private(  # type: ignore[call-overload]
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0
    )
    engine.make_private_with_epsilon(  # type: ignore[call-overload]
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=8.0,
        target_delta=1e-5,
        max_grad_norm=1.0,
        epochs="1",
    )
    GradSampleModuleFlashClipping(model, kernels="cutlass")  # type: ignore[arg-type]
    GradSampleModuleFlashClipping(model, strickt=True)  # type: ignore[call-arg]
    wrong: int = engine.get_epsilon(1e-5)  # type: ignore[assignment]
    assert wrong is flash_clipping.FlashPrivacyEngin  # type: ignore[attr-defined]
