"""``PrivateTrainer`` before another trainer: TRL's, whose arguments have an order of their own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

from flash_clipping import Documents, per_sample_loss
from flash_clipping.trainers.transformers import PrivateTrainer
from tests.support.errors import raises
from tests.support.trainers import Texts, arguments, bert, llama, privacy, tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
ours = importlib.import_module("flash_clipping.trainers.trl")


class WithReference(Trainer):
    """Arguments in the order of TRL's trainers of preferences."""

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, *more: Any, **kw: Any):
        self.ref_model = ref_model
        super().__init__(model, args, *more, **kw)


class Mixin:
    """Hands all arguments on."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)


class Private(PrivateTrainer, Mixin, WithReference):
    pass


def test_arguments_by_position(tmp_path: Path) -> None:
    reference, args = bert(), arguments(tmp_path, max_steps=1)
    private = Private(
        bert(), reference, args, None, Texts(20), eval_dataset=Texts(3), privacy=privacy()
    )
    assert private.ref_model is reference
    assert private.args.gradient_accumulation_steps == 1
    assert args.gradient_accumulation_steps == 3
    private.train()
    assert private.run.engine.accountant.history == [(1.0, 0.25, 1)]
    with raises("FC809", ValueError, match="WithReference"):
        Private(bert(), reference, privacy=privacy())


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "max_steps": 2,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
}


def of_texts(**columns: list[Any]) -> Any:
    return datasets.Dataset.from_dict(columns)


TEXTS = ["a b c d", "e f g", "h a b c d", "c a"] * 3


def update_by_hand(model: Any, losses: list[Any]) -> list[Tensor]:
    """The sum of clipped gradients, one sample at a time, over the expected batch of six."""
    params = [p for p in model.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in params]
    for loss in losses:
        grads = torch.autograd.grad(loss(model), params, allow_unused=True)
        found = [torch.zeros_like(s) if g is None else g for g, s in zip(grads, sums, strict=True)]
        norm = torch.stack([g.square().sum() for g in found]).sum().sqrt()
        for total, grad in zip(sums, found, strict=True):
            total += grad * (BOUND / (norm + 1e-6)).clamp(max=1)
    return [total / 6 for total in sums]


BOUND = 0.01


@pytest.mark.parametrize("padding_free", [False, True])
def test_texts_are_samples(tmp_path: Path, padding_free: bool) -> None:
    class Recording(ours.PrivateSFTTrainer):
        def training_step(self, model: nn.Module, inputs: Any, *more: Any) -> Tensor:
            ids = [part["input_ids"] for part in inputs.parts]
            where = [part.get("document", part.get("attention_mask")) for part in inputs.parts]
            self.drawn = [
                x[0][m[0] == n][None] if padding_free else x[n][m[n] != 0][None]
                for x, m, size in zip(ids, where, inputs.sizes, strict=True)
                for n in range(size)
            ]
            return super().training_step(model, inputs, *more)

    args = trl.SFTConfig(
        output_dir=str(tmp_path),
        gradient_checkpointing=False,
        padding_free=padding_free,
        max_length=None,
        **SETTINGS | {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "warmup_steps": 0},
    )
    model, plain = llama(), llama()
    private = Recording(
        model,
        args,
        None,
        of_texts(text=TEXTS),
        processing_class=tokenizer(),
        privacy=privacy(noise_multiplier=0.0, max_grad_norm=BOUND),
    )
    private.train()
    assert private.run.sample_rate == 1 / 2 and private.run.steps == 1
    assert 2 <= len(private.drawn) < 12
    expected = update_by_hand(
        plain,
        [lambda m, x=x: per_sample_loss(m(x).logits, x, shift=True)[0] for x in private.drawn],
    )
    for before, after, update in zip(plain.parameters(), model.parameters(), expected, strict=True):
        assert torch.allclose(before - after, update, atol=4e-7)
    assert max(float(update.abs().max()) for update in expected) > 3e-4


def test_packed_texts_are_refused(tmp_path: Path) -> None:
    for options, words in (({"packing": True}, "padding_free=True"), ({"loss_type": "dft"}, "dft")):
        args = trl.SFTConfig(output_dir=str(tmp_path), **SETTINGS, **options)
        with raises("FC802", ValueError, match=words) as error:
            ours.PrivateSFTTrainer(llama(), args, privacy=privacy())
        if "packing" in options:  # the line trains
            line = str(error.value).splitlines()[-1].strip()
            settings = f"(output_dir={str(tmp_path)!r}, **SETTINGS, "
            args = eval("trl." + line.replace("(", settings))
            data = of_texts(text=TEXTS)
            given = {"processing_class": tokenizer(), "privacy": privacy()}
            ours.PrivateSFTTrainer(llama(), args, None, data, **given)
    args = trl.SFTConfig(output_dir=str(tmp_path), padding_free=True, **SETTINGS)
    with raises("FC801", ValueError, match="found unit=Documents.*'row'"):
        ours.PrivateSFTTrainer(llama(), args, privacy=privacy(unit=Documents("row")))


@pytest.mark.parametrize(
    ("loss_type", "adapters", "known"),
    [("sigmoid", False, False), ("hinge", True, False), ("sigmoid", True, True)],
    ids=["reference model", "adapters, hinge", "reference known before"],
)
def test_pairs_are_samples(tmp_path: Path, loss_type: str, adapters: bool, known: bool) -> None:
    """A step is that of one pair at a time; the mean of its losses is TRL's own loss."""
    found: dict[str, Any] = {}
    pairs: list[dict[str, Tensor]] = []

    class Recording(ours.PrivateDPOTrainer):
        def training_step(self, model: nn.Module, inputs: Any, *more: Any) -> Tensor:
            names = ("input_ids", "attention_mask", "completion_mask")
            for part, size in zip(inputs.parts, inputs.sizes, strict=True):
                pairs.extend({k: part[k][[n, n + size]] for k in names} for n in range(size))
            return super().training_step(model, inputs, *more)

        def compute_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            losses: Tensor = super().compute_sample_losses(model, inputs)
            found.setdefault("losses", losses.detach())
            found.setdefault("inputs", inputs)
            return losses

    texts = ["c d", "e f g", "a", "h h a b"] * 3
    prompts = ["a b", "c", "d e f", "a"] * 3
    data = of_texts(prompt=prompts, chosen=texts, rejected=[f"b {x}" for x in texts])
    args = trl.DPOConfig(
        output_dir=str(tmp_path),
        gradient_checkpointing=False,
        loss_type=loss_type,
        beta=0.5,
        precompute_ref_log_probs=known,
        **SETTINGS | {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0},
    )
    model: Any = llama()
    options: dict[str, Any] = {"ref_model": llama()}
    if adapters:
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
        options = {"peft_config": config}
    private = Recording(
        model,
        args=args,
        train_dataset=data,
        processing_class=tokenizer(),
        privacy=privacy(noise_multiplier=0.0, max_grad_norm=BOUND),
        **options,
    )
    trained = private.model
    if not adapters:  # away from the reference, where all margins are 0
        with torch.no_grad():
            for p in trained.parameters():
                p.add_(0.2 * torch.randn_like(p))
    plain: Any = peft.get_peft_model(llama(), config) if adapters else llama()
    plain.load_state_dict(trained.state_dict())
    private.train()
    assert private.run.steps == 1 and 2 <= len(pairs) < 12

    def gains(m: Any, pair: dict[str, Tensor]) -> Tensor:
        x, mask = pair["input_ids"], pair["completion_mask"]
        words = m(x, attention_mask=pair["attention_mask"]).logits[:, :-1].log_softmax(2)
        of_words: Tensor = words.gather(2, x[:, 1:, None]).squeeze(2) * mask[:, 1:]
        return of_words.sum(1)

    def loss(m: Any, pair: dict[str, Tensor]) -> Tensor:
        chosen, rejected = gains(m, pair) - gains(llama(), pair).detach()
        margin = 0.5 * (chosen - rejected)
        return (1 - margin).relu() if loss_type == "hinge" else (1 + (-margin).exp()).log()

    expected = update_by_hand(plain, [lambda m, pair=pair: loss(m, pair) for pair in pairs])
    updates = iter(expected)
    for before, after in zip(plain.parameters(), trained.parameters(), strict=True):
        update = next(updates) if before.requires_grad else torch.zeros_like(before)
        assert torch.allclose(before - after, update, atol=4e-7)
    assert max(float(update.abs().max()) for update in expected) > 3e-4
    trained.load_state_dict(plain.state_dict())
    inputs = {n: x for n, x in found["inputs"].items() if n != "pair"}
    trained.train()
    theirs = trl.DPOTrainer._compute_loss(private, trained, inputs, False)
    assert len(found["losses"]) == len(inputs["input_ids"]) // 2
    assert torch.allclose(found["losses"].mean(), theirs, atol=1e-6)
    assert float(found["losses"].std()) > 1e-4


def test_arguments_of_another_class_are_refused(tmp_path: Path) -> None:
    for cls, wanted in (
        (ours.PrivateSFTTrainer, "SFTConfig"),
        (ours.PrivateDPOTrainer, "DPOConfig"),
    ):
        with raises("FC809", ValueError, match=f"TrainingArguments; expected {wanted}"):
            cls(llama(), args=arguments(tmp_path), privacy=privacy())


def test_other_losses_of_pairs_are_refused(tmp_path: Path) -> None:
    for options, words in (
        ({"loss_type": "aot"}, "loss_type=\\['aot'\\]"),
        ({"f_divergence_type": "js_divergence"}, "js_divergence"),
        ({"ld_alpha": 0.5}, "ld_alpha=0.5"),
        ({"use_weighting": True}, "use_weighting=True"),
        ({"loss_weights": [2.0]}, "loss_weights=\\[2.0\\]"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef=0.1"),
    ):
        args = trl.DPOConfig(output_dir=str(tmp_path), **SETTINGS, **options)
        with raises("FC802", ValueError, match=words):
            ours.PrivateDPOTrainer(llama(), args=args, privacy=privacy())
