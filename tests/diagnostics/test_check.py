"""``check`` on models that are right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.diagnostics import check
from tests.support.models import CASES
from tests.support.oracle import per_sample_truth

#: One model of each rule; the others are compared with one of these oracles in tests of rules.
OF_RULES = {
    "transposed_linear", "generic", "hyper_connections", "parameter_proxies", "embedding_bag_mean",
    "torch_attention_options", "opacus_lstm", "mixed",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in OF_RULES)) for name in CASES],
)
def test_every_rule_passes_in_float64(name: str) -> None:
    case = CASES[name]
    model, batch = case.make(), case.batch()
    report = check(model, batch, case.loss, dtype=torch.float64)
    assert report.passed, str(report)
    assert report.dtype == "float64" and report.tolerance == 1e-9
    # The two oracles share no code: one sample at a time, and vmap.
    truth = per_sample_truth(model, batch, case.loss)
    assert report.oracle_norms == pytest.approx(truth.norms.tolist(), rel=1e-9)
    for parameter in report.parameters:
        assert parameter.status == "PASS"
        assert parameter.oracle_norms == pytest.approx(
            truth.param_norms[parameter.name].tolist(), rel=1e-9, abs=1e-12
        )
    assert len(report.changes) > report.batch_size and max(report.changes) <= report.tolerance


def test_the_tolerance_is_that_of_the_narrowest_dtype_under_autocast() -> None:
    case = CASES["attention"]

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return case.loss(model, batch)

    report = check(case.make(), case.batch(), loss)
    assert report.passed and report.dtype == "bfloat16", str(report)
    assert 1e-4 < report.norm_error < report.tolerance


def test_nothing_of_the_users_is_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(5, 4)
    copy, generator = x.clone(), torch.get_rng_state()
    assert check(model, x).passed
    assert model[1].p == 0.5 and model.training
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(x, copy) and torch.equal(torch.get_rng_state(), generator)
    GradSampleModuleFlashClipping(model)  # no hooks were left on it
