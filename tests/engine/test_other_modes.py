"""Opacus' other modes through this library's engine, and its norm samplers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
)
from opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from torch import Tensor, nn

from flash_clipping import FlashPrivacyEngine, register_flash_norm_samplers
from tests.support.engine import EngineTraining, assert_states_close

# -- Opacus' other modes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grad_sample_mode", "module_type", "optimizer_type"),
    [
        ("hooks", GradSampleModule, DPOptimizer),
        ("functorch", GradSampleModule, DPOptimizer),
        ("ew", GradSampleModuleExpandedWeights, DPOptimizer),
        ("ghost", GradSampleModuleFastGradientClipping, DPOptimizerFastGradientClipping),
    ],
)
def test_other_modes_are_opacus_own(
    grad_sample_mode: str, module_type: type, optimizer_type: type
) -> None:
    options: dict[str, Any] = {
        "grad_sample_mode": grad_sample_mode,
        "poisson_sampling": False,
        "noise_multiplier": 1.0,
        "max_grad_norm": 0.5,
    }
    ours = EngineTraining(FlashPrivacyEngine(), **options)
    opacus = EngineTraining(PrivacyEngine(), **options)
    assert type(ours.wrapper) is type(opacus.wrapper) is module_type
    assert type(ours.optimizer) is type(opacus.optimizer) is optimizer_type
    assert type(ours.criterion) is type(opacus.criterion)
    assert_states_close(ours.steps(3), opacus.steps(3), 0.0)
    assert ours.engine.accountant.history == opacus.engine.accountant.history


def test_other_modes_keep_their_clipping_and_epsilon() -> None:
    options: dict[str, Any] = {"grad_sample_mode": "hooks", "poisson_sampling": False}
    per_layer = {**options, "clipping": "per_layer", "max_grad_norm": [0.2] * 10}
    assert_states_close(
        EngineTraining(FlashPrivacyEngine(), **per_layer).steps(2),
        EngineTraining(PrivacyEngine(), **per_layer).steps(2),
        0.0,
    )
    budget = {**options, "target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 1}
    ours = EngineTraining(FlashPrivacyEngine(), **budget)
    assert type(ours.wrapper) is GradSampleModule
    opacus = EngineTraining(PrivacyEngine(), **budget)
    assert ours.optimizer.noise_multiplier == opacus.optimizer.noise_multiplier


# -- one gradient, many ways to ask for it --------------------------------------------------------


@pytest.fixture
def opacus_samplers() -> Iterator[None]:
    before = dict(GradSampleHooksFastGradientClipping.NORM_SAMPLERS)
    yield
    GradSampleHooksFastGradientClipping.NORM_SAMPLERS.clear()
    GradSampleHooksFastGradientClipping.NORM_SAMPLERS.update(before)


@pytest.mark.usefixtures("opacus_samplers")
def test_registered_norm_samplers_make_opacus_ghost_right_for_4d_inputs() -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6, padding_idx=0)
            self.first = nn.Linear(6, 8)
            self.second = nn.Linear(8, 3, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(self.embed(ids)))).flatten(1)

    torch.manual_seed(0)
    model = Windows().double()
    ids = torch.randint(0, 11, (5, 3, 4))
    norms = []
    for b in range(5):
        model.zero_grad()
        model(ids[b : b + 1]).square().sum().backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    model.zero_grad()

    ghost = GradSampleModuleFastGradientClipping(model, max_grad_norm=0.5, loss_reduction="mean")
    register_flash_norm_samplers()
    losses = ghost(ids).square().sum(1)
    losses.mean().backward(retain_graph=True)
    torch.testing.assert_close(ghost.get_norm_sample(), torch.stack(norms))


@pytest.mark.usefixtures("opacus_samplers")
def test_registered_norm_samplers_in_an_existing_engine() -> None:
    options: dict[str, Any] = {"grad_sample_mode": "ghost", "poisson_sampling": False}
    before = EngineTraining(PrivacyEngine(), **options).steps(3)
    after = EngineTraining(PrivacyEngine(), **options)
    register_flash_norm_samplers()
    assert_states_close(after.steps(3), before)
