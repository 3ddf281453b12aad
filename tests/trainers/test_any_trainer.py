"""``private(TheirTrainer)``: any trainer's own mean of losses, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
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
    POSITIONS,
    WORDS,
    Texts,
    arguments,
    llama,
    privacy,
    tokenizer,
    trainer,
    weights,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:GDP accounting is experimental"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
]


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


def test_a_mean_of_samples_trains_as_losses_of_samples(tmp_path: Path) -> None:
    trained = []
    for cls in (private(Focal), OfSamples):
        made = trainer(tmp_path, cls=cls, of_privacy={"max_grad_norm": 0.05}, optim="sgd")
        made.train()
        trained.append(weights(made.model))
        assert made.run.steps == 8
    first, second = trained
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-7)


class _Own(Trainer):
    """A loss of the batch: of logits ``[B, K]``, labels ``[B]`` and lengths ``[B]``."""

    batch_loss: Callable[..., Tensor]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return type(self).batch_loss(logits, labels, inputs["attention_mask"].sum(1))


def _weighted(logits: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    return (F.cross_entropy(logits, labels, reduction="none") * lengths).sum() / lengths.sum()


def _summed(logits: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def _contrastive(logits: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


def _hardest(logits: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    """A mean in batches of four samples."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses.topk(min(4, len(losses))).values.mean()


def _balanced(logits: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    """A mean where all classes are as frequent."""
    frequency = (labels[:, None] == labels).sum(1)
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses / frequency).sum() / (1 / frequency).sum()


def _of_pairs(logits: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    """Nothing without two samples of a class, or alone."""
    alike = (labels[:, None] == labels) & ~torch.eye(len(labels), dtype=torch.bool)
    return (logits @ logits.T).where(alike, 0.0).sum()


def _alike_at_first() -> Texts:
    """The first samples have all positions and class 0."""
    made = Texts(20)
    made.lengths[:-1], made.lengths[-1] = POSITIONS, 2
    made.labels[:-1], made.labels[-1] = 0, 2
    return made


def _as_frequent() -> Texts:
    """Two classes of two samples."""
    made = Texts(4)
    made.labels[:] = torch.tensor([0, 0, 1, 1])
    return made


@pytest.mark.parametrize("dataset", [lambda: Texts(20), _alike_at_first, _as_frequent])
@pytest.mark.parametrize("loss", [_weighted, _summed, _contrastive, _hardest, _balanced, _of_pairs])
def test_a_loss_that_is_no_mean_of_samples_is_refused(
    tmp_path: Path, loss: Callable[..., Tensor], dataset: Callable[[], Texts]
) -> None:
    cls = type("Theirs", (_Own,), {"batch_loss": staticmethod(loss)})
    made = trainer(tmp_path, cls=private(cls), more={"train_dataset": dataset()})
    with raises("FC806", ValueError, match=r"PrivateTheirs.*no mean of samples' losses"):
        made.train()
    assert not made.run.steps


def test_a_loss_that_compares_samples_in_training_only_is_refused(tmp_path: Path) -> None:
    class Theirs(Focal):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            if not model.training:
                return super().compute_loss(model, inputs)
            logits = model(**{k: x for k, x in inputs.items() if k != "labels"}).logits
            return _contrastive(logits, inputs["labels"], inputs["labels"])

    made = trainer(tmp_path, cls=private(Theirs))
    with raises("FC806", ValueError, match="no mean of samples' losses"):
        made.train()
    assert not made.run.steps and made.model.training


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


def test_a_loss_of_each_sample_is_refused_as_a_mean(tmp_path: Path) -> None:
    cls = type("Theirs", (_Own,), {"batch_loss": staticmethod(lambda x, y, n: focal(x, y))})
    with raises("FC804", ValueError, match="expected one number"):
        trainer(tmp_path, cls=private(cls)).train()


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

    def test_trainers_of_rewards_may_have_a_loss_of_their_own(self) -> None:
        theirs = type("Theirs", (self.trl.RewardTrainer,), {"compute_loss": Focal.compute_loss})
        made = private(theirs)
        assert made.compute_loss is Focal.compute_loss
        losses = private(self.trl.RewardTrainer).compute_sample_losses
        assert made.compute_sample_losses is losses

    def test_pairs_of_a_reward_model_are_samples(self, tmp_path: Path) -> None:
        """A step is that of one pair at a time, by TRL's own loss."""
        pairs: list[dict[str, Tensor]] = []

        class Recording(private(self.trl.RewardTrainer)):  # type: ignore[misc]
            def training_step(self, model: nn.Module, inputs: Any, *more: Any) -> Tensor:
                for part, size in zip(inputs.parts, inputs.sizes, strict=True):
                    names = ("input_ids", "attention_mask")
                    pairs.extend({k: part[k][[n, n + size]] for k in names} for n in range(size))
                return super().training_step(model, inputs, *more)

        torch.manual_seed(0)
        model = LlamaForSequenceClassification(
            LlamaConfig(
                vocab_size=len(WORDS), hidden_size=8, intermediate_size=16, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, eos_token_id=2,
                num_labels=1,
            )
        )  # fmt: skip
        before = weights(model)
        rows = [{"chosen": f"a b {c} c", "rejected": f"d {c}"} for c in "abcdefgh"]
        args = self.trl.RewardConfig(
            **self.settings(tmp_path) | {"optim": "sgd", "learning_rate": 1.0, "warmup_steps": 0},
            gradient_checkpointing=False,
        )
        made = Recording(
            model=model,
            args=args,
            train_dataset=self.datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
            privacy=privacy(noise_multiplier=0.0, max_grad_norm=0.01),
        )
        made.train()
        after = weights(model)
        model.load_state_dict(before)
        params = dict(model.named_parameters())
        sums = {name: torch.zeros_like(p) for name, p in params.items()}
        for pair in pairs:
            chosen, rejected = model(**pair).logits.flatten()
            loss = -F.logsigmoid(chosen - rejected)
            grads = torch.autograd.grad(loss, [*params.values()], allow_unused=True)
            found = [
                torch.zeros_like(p) if g is None else g
                for p, g in zip(params.values(), grads, strict=True)
            ]
            norm = torch.stack([g.square().sum() for g in found]).sum().sqrt()
            for total, grad in zip(sums.values(), found, strict=True):
                total += grad * (0.01 / (norm + 1e-6)).clamp(max=1) / 4
        assert len(pairs) > 1 and max(float(x.abs().max()) for x in sums.values()) > 1e-4
        for name, total in sums.items():
            torch.testing.assert_close(before[name] - after[name], total, rtol=0, atol=4e-7)

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("KTOTrainer", "in order"),
            ("GRPOTrainer", "RepeatSampler"),
            ("RLOOTrainer", "RepeatSampler"),
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
