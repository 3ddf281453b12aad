"""What ``PrivateTrainer`` refuses, each by its name."""

from __future__ import annotations

import operator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, default_data_collator

from flash_clipping import Documents, GradSampleModuleFlashClipping, Shuffled, Users
from flash_clipping.trainers import refused
from flash_clipping.trainers.arguments import PrivacyArguments
from flash_clipping.trainers.private_run import PrivateRun
from flash_clipping.trainers.refused import refuse_arguments, refuse_trainer
from flash_clipping.trainers.transformers import PrivateTrainer
from tests.support.errors import raises
from tests.support.trainers import Texts, arguments, bert, privacy, trainer

#: Of the installed version.


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(Texts(3))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"torch_compile": True}, "torch_compile=True"),
        ({"neftune_noise_alpha": 5.0}, "(?s)neftune_noise_alpha=5.0.*longest"),
        ({"train_sampling_strategy": "group_by_length"}, "by length"),
        ({"train_sampling_strategy": "sequential"}, "in order"),
        ({"max_grad_norm": 0.0}, "max_grad_norm: found 0.0 in TrainingArguments"),
        (
            {"max_grad_norm": 2.0, "of_privacy": {"max_grad_norm": 0.5}},
            "found 2.0 in TrainingArguments and 0.5 in PrivacyArguments",
        ),
        ({"more": {"model_init": bert}}, "model_init"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"}, "layerwise"),
    ],
)
def test_arguments(tmp_path: Path, settings: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        trainer(tmp_path, **settings)


def test_fp16_and_several_devices(tmp_path: Path) -> None:
    """Set on the arguments: without a GPU, ``TrainingArguments`` does not let them be asked for."""
    for name, value, found in (
        ("fp16", True, "fp16=True.*bf16"),
        ("_n_gpu", 2, "2 GPUs.*one device"),
        ("deepspeed", {}, None),
        ("deepspeed", {"zero": 2}, "deepspeed.*one device"),
    ):
        args = arguments(tmp_path)
        setattr(args, name, value)
        if found is None:
            refuse_arguments(args)
            continue
        with raises("FC802", ValueError, match=found):
            refuse_arguments(args)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"accelerator.state.parallelism_config": SimpleNamespace(cp_size=2)}, "with cp_size=2"),
        ({"accelerator.state.parallelism_config": SimpleNamespace(sp_size=4)}, "with sp_size=4"),
        ({"accelerator.state.parallelism_config": SimpleNamespace(tp_size=2)}, "with tp_size=2"),
        ({"model._tp_size": 2, "args.save_strategy": "no"}, "layers cut over 2 of 1 processes"),
        ({"model._tp_size": 1}, "whose parameters are shards.*tp_plan"),
    ],
)
def test_forms_of_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], found: str
) -> None:
    made = trainer(tmp_path)
    refuse_trainer(made)
    for name, value in changes.items():
        owner, _, attribute = name.rpartition(".")
        monkeypatch.setattr(operator.attrgetter(owner)(made), attribute, value)
    monkeypatch.setattr(refused, "has_shards", lambda model: "model._tp_size" in changes)
    with raises("FC802", ValueError, match=found):
        refuse_trainer(made)


def test_a_bound_in_either_place(tmp_path: Path) -> None:
    private = PrivateTrainer(bert(), arguments(tmp_path), default_data_collator, privacy=privacy())
    assert private.data_collator is default_data_collator
    assert private._max_grad_norm == 1.0
    for settings in (
        {"max_grad_norm": 0.5},
        {"of_privacy": {"max_grad_norm": 0.5}},
        {"max_grad_norm": 0.0, "of_privacy": {"max_grad_norm": 0.5}},
    ):
        private = trainer(tmp_path, **settings)
        assert (private._max_grad_norm, private.args.max_grad_norm) == (0.5, 0.0)


def test_a_loss_of_the_whole_batch(tmp_path: Path) -> None:
    class OfBatch(PrivateTrainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **kwargs)

    with raises("FC802", ValueError, match="compute_loss of OfBatch.*compute_sample_losses"):
        trainer(tmp_path, cls=OfBatch)

    class Both(OfBatch):
        def compute_sample_losses(self, model: nn.Module, inputs: Any) -> Tensor:
            return super().compute_sample_losses(model, inputs)

    trainer(tmp_path, cls=Both)


def test_experts_that_are_balanced_over_the_batch(tmp_path: Path) -> None:
    with raises("FC802", ValueError, match="output_router_logits=True"):
        trainer(tmp_path, bert(output_router_logits=True))


def test_data_that_cannot_be_drawn_by_index(tmp_path: Path) -> None:
    private = trainer(tmp_path, more={"train_dataset": Stream()}, max_steps=1)
    with raises("FC802", ValueError, match="train_dataset of type Stream"):
        private.train()


class OwnLoader(PrivateTrainer):
    def get_train_dataloader(self) -> Any:
        super().get_train_dataloader()
        return torch.utils.data.DataLoader(Texts(20), batch_size=5)


def test_batches_of_another_loader(tmp_path: Path) -> None:
    with raises("FC807", ValueError, match="dict"):
        trainer(tmp_path, cls=OwnLoader, max_steps=1).train()


class PlainLoader(PrivateTrainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Texts(20), batch_size=5)


def test_a_loader_in_the_place_of_the_private_one(tmp_path: Path) -> None:
    with raises("FC807", RuntimeError):
        trainer(tmp_path, cls=PlainLoader, max_steps=1).train()


class PlainOptimizer(PrivateTrainer):
    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        return Trainer.create_scheduler(self, *args, **kwargs)


def test_an_optimizer_without_noise(tmp_path: Path) -> None:
    with raises("FC807", RuntimeError):
        trainer(tmp_path, cls=PlainOptimizer, max_steps=1).train()


def test_steps_past_the_accountant(tmp_path: Path) -> None:
    """Every step of the Trainer is one that is accounted, no more and no less."""

    class Twice(TrainerCallback):
        def on_optimizer_step(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
            private.run.engine.accountant.step(noise_multiplier=1.0, sample_rate=0.25)

    private = trainer(tmp_path, max_steps=2, more={"callbacks": [Twice()]})
    with raises("FC584", RuntimeError, match="counts 1.*2"):
        private.train()


class Forgetful(PrivateTrainer):
    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """As if another version of transformers had another name for it."""


def test_a_checkpoint_whose_accountant_is_not_loaded(tmp_path: Path) -> None:
    """No step is done on it."""
    trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    private = trainer(tmp_path, max_steps=2, cls=Forgetful)
    with raises("FC584", RuntimeError, match="counts 1.*0"):
        private.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert private.run.steps == 0


def test_gradients_that_a_callback_changes(tmp_path: Path) -> None:
    class Clip(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    private = trainer(tmp_path, max_steps=1, more={"callbacks": [Clip()]})
    with raises("FC503", ValueError, match="is not the clipped sum"):
        private.train()
    assert private.run.steps == 0


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, "exactly one of them"),
        ({"target_epsilon": 1.0, "noise_multiplier": 1.0}, "exactly one of them"),
        ({"noise_multiplier": 1.0, "seed": 0, "secure_mode": True}, "seed=0 with secure_mode=True"),
        ({"noise_multiplier": 1.0, "unit": Users([0])}, "unit=Users"),
        ({"noise_multiplier": 1.0, "mechanism": Shuffled()}, "found mechanism=Shuffled"),
        ({"noise_multiplier": 1.0, "mechanism": "poisson"}, "found mechanism=poisson"),
        ({"noise_multiplier": 1.0, "engine_options": {"unit": None}}, "engine_options with unit"),
    ],
)
def test_privacy_arguments(settings: dict[str, Any], found: str) -> None:
    with raises("FC311|FC801", ValueError, match=found):
        PrivateRun(PrivacyArguments(**({"target_delta": 1e-5} | settings)))


def test_a_model_whose_trained_layers_are_offloaded(tmp_path: Path) -> None:
    model = bert()
    places = {"bert": "disk", "classifier": "cpu"}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    with raises(
        "FC125", RuntimeError, match=r"word_embeddings.weight: .*Accelerate.*\n.*device_map"
    ):
        trainer(tmp_path, model=model)


def test_a_model_wrapped_for_units(tmp_path: Path) -> None:
    """Its units would not be those that ε is about: the trainer draws and accounts rows."""
    with raises("FC802", ValueError, match="take the hooks off first"):
        trainer(tmp_path, model=GradSampleModuleFlashClipping(bert(), unit=Documents("user")))
