"""``private(TheirTrainer)``: any trainer's own mean of losses, or a refusal by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForSequenceClassification, Seq2SeqTrainer, Trainer

from flash_clipping.trainers import private
from flash_clipping.trainers.transformers import PrivateSeq2SeqTrainer, PrivateTrainer
from tests.support.errors import raises
from tests.support.trainers import (
    WORDS,
    arguments,
    llama,
    privacy,
    tokenizer,
    trainer,
    weights,
)


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """``[B]``: a loss that no model has."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (1 - (-losses).exp()).square() * losses


class Focal(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        labels = inputs.pop("labels")
        return focal(model(**inputs).logits, labels).mean()


class OfSamples(PrivateTrainer):
    def compute_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        return focal(model(**inputs).logits, labels)


@pytest.mark.parametrize("has_loss", [False, True])
def test_losses_of_samples_of_a_plain_trainer_are_trained_by(
    tmp_path: Path, has_loss: bool
) -> None:
    losses = OfSamples.compute_sample_losses
    more = {"compute_loss": Focal.compute_loss} if has_loss else {}
    cls = type("Theirs", (Trainer,), {"compute_sample_losses": losses, **more})
    trained = []
    for made in (private(cls), OfSamples):
        trained.append(trainer(tmp_path, cls=made, optim="sgd"))
        trained[-1].train()
    first, second = (weights(made.model) for made in trained)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("base", [Trainer, PrivateTrainer, OfSamples])
def test_a_loss_of_the_batch_is_refused_unless_losses_of_samples_come_later(
    tmp_path: Path, base: Any
) -> None:
    cls = private(type("Theirs", (base,), {"compute_loss": Focal.compute_loss}))
    if base is OfSamples:
        trainer(tmp_path, cls=cls)
        return
    with raises("FC802", ValueError, match="compute_loss of .*Override compute_sample_losses"):
        trainer(tmp_path, cls=cls)
    losses = {"compute_sample_losses": OfSamples.compute_sample_losses}
    trainer(tmp_path, cls=type("Mine", (cls,), losses))


def test_known_trainers_have_forms_of_their_own() -> None:
    assert private(Trainer) is PrivateTrainer
    assert private(Seq2SeqTrainer) is PrivateSeq2SeqTrainer
    assert private(PrivateTrainer) is PrivateTrainer

    class Plain(Seq2SeqTrainer):
        """Overrides nothing that a private trainer has."""

    assert private(Plain).__mro__[1:3] == (PrivateSeq2SeqTrainer, PrivateTrainer)
    with raises("FC809", TypeError, match="expected a subclass"):
        private(nn.Linear)


class TestTrl:
    """Trainers of TRL that have no module of tests."""

    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    def settings(self, folder: Path) -> dict[str, Any]:
        own = {"per_device_train_batch_size": 4, "max_steps": 1, "bf16": False}
        kept = ("output_dir", "use_cpu", "report_to", "disable_tqdm", "save_strategy")
        made = arguments(folder)
        return own | {name: getattr(made, name) for name in kept} | {"use_cpu": True}

    def of_rewards(self, cls: Any, folder: Path, **settings: Any) -> Any:
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(
            LlamaConfig(
                vocab_size=len(WORDS), hidden_size=8, intermediate_size=16, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, eos_token_id=2,
                num_labels=1,
            )
        )  # fmt: skip
        rows = [{"chosen": f"a b {c} c", "rejected": f"d {c}"} for c in "abcdefgh"]
        args = self.trl.RewardConfig(
            **self.settings(folder) | {"optim": "sgd", "learning_rate": 1.0, "warmup_steps": 0},
            gradient_checkpointing=False,
            **settings,
        )
        return cls(
            model=model,
            args=args,
            train_dataset=self.datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
            privacy=privacy(noise_multiplier=0.0, max_grad_norm=0.01),
        )

    def test_trainers_of_rewards_have_no_loss_of_their_own(self, tmp_path: Path) -> None:
        theirs = type("Theirs", (self.trl.RewardTrainer,), {"compute_loss": Focal.compute_loss})
        with raises("FC802", ValueError, match="compute_loss of PrivateTheirs"):
            self.of_rewards(private(theirs), tmp_path)

    @pytest.mark.parametrize("centered", [None, 0.3])
    def test_losses_of_pairs_are_those_of_trl(self, centered: float | None, tmp_path: Path) -> None:
        made = self.of_rewards(
            private(self.trl.RewardTrainer), tmp_path, center_rewards_coefficient=centered
        )
        tokens = torch.randint(1, len(WORDS), (6, 5))
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        for more in ({}, {"margin": torch.tensor([0.5, 0.0, 2.0])}):
            losses = made.compute_sample_losses(made.model, inputs | more)
            theirs = made.compute_loss(made.model, inputs | more)
            assert losses.shape == (3,)
            torch.testing.assert_close(losses.mean(), theirs)

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("KTOTrainer", "in order"),
            ("GRPOTrainer", "compute_loss"),
            ("RLOOTrainer", "compute_loss"),
        ],
    )
    def test_others_are_refused_by_name(self, name: str, words: str, tmp_path: Path) -> None:
        config = getattr(self.trl, name.replace("Trainer", "Config"))
        more: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        rows = [{"prompt": f"a {c}"} for c in "abcdefgh"]
        if name == "KTOTrainer":
            rows = [row | {"completion": " c", "label": True} for row in rows]  # type: ignore[dict-item]
        else:
            more["reward_funcs"] = lambda **kwargs: [0.0] * len(kwargs["prompts"])
            settings = {"num_generations": 2, "beta": 0.0}
        with raises("FC802", ValueError, match=words):
            private(getattr(self.trl, name))(
                model=llama(),
                args=config(**self.settings(tmp_path), **settings),
                train_dataset=self.datasets.Dataset.from_list(rows),
                processing_class=tokenizer(),
                privacy=privacy(),
                **more,
            ).train()
