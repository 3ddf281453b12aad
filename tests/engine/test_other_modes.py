"""Opacus' other modes through this library's engine."""

from __future__ import annotations

from typing import Any

import pytest
from opacus import PrivacyEngine
from opacus.grad_sample import (
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
)
from opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping

from flash_clipping import FlashPrivacyEngine
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
