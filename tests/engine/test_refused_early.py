"""Ordinary calls that crashed: an answer now, or an error that says what to write."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
from torch import nn
from torch.utils.data import DataLoader

from flash_clipping import FlashClippingError, FlashPrivacyEngine
from tests.support.private import Private, TwoLayers, data


def arguments(**options: Any) -> dict[str, Any]:
    model = TwoLayers()
    return {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(data(), batch_size=16),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    } | options


@pytest.mark.parametrize("multiplier", [1e-6, 0.01, 0.0])
def test_next_to_no_noise_has_a_huge_epsilon(multiplier: float) -> None:
    engine = FlashPrivacyEngine()
    private = Private(engine=engine, noise_multiplier=multiplier)
    for _ in range(3):
        private.step()
    assert engine.accountant.mechanism() == "prv"
    epsilon = engine.get_epsilon(1e-5)
    assert type(epsilon) is float and epsilon > 1e3
    assert math.isinf(epsilon) == (multiplier == 0)


def test_little_noise_has_no_epsilon_that_is_too_small() -> None:
    """One step on a batch that has the sample with probability 1/100: beside noise of 0.01 bounds
    its privacy loss is 5000 at least whenever it is there, which is more often than delta."""
    accountant = FlashPrivacyEngine().accountant
    accountant.history = [(0.01, 0.01, 1)]
    assert accountant.get_epsilon(1e-5) > 5000


def test_epsilon_is_opacus_where_that_can_be_computed() -> None:
    ours, theirs, rdp = FlashPrivacyEngine().accountant, PRVAccountant(), RDPAccountant()
    for accountant in (ours, theirs, rdp):
        accountant.history = [(1.1, 0.01, 500), (0.9, 0.02, 10)]
    assert ours.get_epsilon(1e-5) == theirs.get_epsilon(1e-5) < rdp.get_epsilon(1e-5)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_copy_of_the_optimizer_is_refused_and_breaks_nothing(duplicate: Any) -> None:
    private = Private()
    private.step()
    with pytest.raises(FlashClippingError, match=r"copy\.deepcopy\(optimizer\.state_dict\(\)\)"):
        duplicate(private.optimizer)
    private.step()
    Private().step()


def test_an_optimizer_with_many_evaluations_is_refused() -> None:
    given = arguments()
    given["optimizer"] = torch.optim.LBFGS(given["module"].parameters())
    with pytest.raises(ValueError, match=r"(?s)found LBFGS, .*torch\.optim\.AdamW"):
        FlashPrivacyEngine().make_private(**given)


@pytest.mark.parametrize("engine", [PrivacyEngine, PrivacyEngineAdaptiveClipping])
@pytest.mark.parametrize("wrap_model", [True, False])
def test_engines_of_opacus_say_where_flash_is(engine: Any, wrap_model: bool) -> None:
    with pytest.raises(ValueError, match=r"FlashPrivacyEngine\(\)\.make_private.*\n.*adaptive"):
        engine().make_private(**arguments(grad_sample_mode="flash", wrap_model=wrap_model))
    with pytest.raises(ValueError, match="Unexpected grad_sample_mode: flush"):
        engine().make_private(**arguments(grad_sample_mode="flush"))


def test_a_mode_that_returns_three_things_says_so() -> None:
    engine = FlashPrivacyEngine()
    with (
        pytest.warns(UserWarning, match=r"(?s)'hooks', .*leave grad_sample_mode out:"),
        pytest.raises(ValueError, match="not enough values"),
    ):
        _, _, _, _ = engine.make_private(**arguments(grad_sample_mode="hooks"))


def test_sums_need_no_criterion() -> None:
    for criterion in ({}, {"criterion": None}):
        engine = FlashPrivacyEngine(accountant="rdp")
        found = engine.make_private(**arguments(loss_reduction="sum", **criterion))
        assert isinstance(found[2].criterion, nn.CrossEntropyLoss)
        assert found[2].criterion.reduction == "sum"
    given = arguments(loss_reduction="sum") | {"target_epsilon": 8.0, "target_delta": 1e-5}
    del given["noise_multiplier"]
    engine = FlashPrivacyEngine(accountant="rdp")
    *_, criterion, _ = engine.make_private_with_epsilon(epochs=1, **given)
    assert criterion.criterion.reduction == "sum"


def test_a_missing_accountant_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[accounting\]'"):
        FlashPrivacyEngine(accountant="pld")
