"""The recipes of Hugging Face's example scripts: what is learnt is what ``Trainer`` learns.

Default dropout, dynamic padding, accumulation, evaluation after every epoch. With noise of nearly 0
and a bound that no sample reaches, metrics of evaluation are those of the plain ``Trainer``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from flash_clipping.trainers.transformers import PrivateSeq2SeqTrainer, PrivateTrainer
from tests.support.errors import raises
from tests.support.trainers import arguments, privacy

pytestmark = [
    pytest.mark.filterwarnings("ignore:Optimal order"),
]

WORDS = 24
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = len(SPECIAL) + WORDS
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=32,
    initializer_range=0.1,
)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(SPECIAL)}
    words |= {f"w{number}": len(SPECIAL) + number for number in range(WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


TOKENIZER = tokenizer()


def sentence(rng: Any, words: range, least: int = 3, most: int = 9) -> list[str]:
    return [f"w{rng.choice(words)}" for _ in range(rng.integers(least, most))]


def encoded(text: list[str], **more: Any) -> dict[str, Any]:
    return {**TOKENIZER(" ".join(text), return_token_type_ids=False), **more}


# -- text-classification/run_glue.py -------------------------------------------------------------


def glue(rng: Any) -> dict[str, Any]:
    label = int(rng.integers(2))
    return encoded(sentence(rng, range(16)) + [f"w{16 + label}"], labels=label)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def evaluated(folder: Path, private: bool) -> dict[str, float]:
    """What evaluation finds after training."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    args = arguments(
        folder,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        gradient_accumulation_steps=2,
        max_grad_norm=1e4,
        eval_strategy="epoch",
        seed=1,
        num_train_epochs=6,
        learning_rate=1e-2,
    )
    given: dict[str, Any] = {
        "model": BertForSequenceClassification(BertConfig(**SIZES)),
        "args": args,
        "train_dataset": [glue(rng) for _ in range(128)],
        "eval_dataset": [glue(rng) for _ in range(64)],
        "data_collator": DataCollatorWithPadding(TOKENIZER),
        "compute_metrics": accuracy,
    }
    if not private:
        trainer = Trainer(**given)
    else:
        of_privacy = privacy(noise_multiplier=1e-7, accountant="rdp", target_delta=1e-3)
        trainer = PrivateTrainer(privacy=of_privacy, **given)
    trainer.train()
    if private:
        assert {reading.clipped_share for _, reading in trainer.run.readings} == {0.0}
    found: dict[str, float] = trainer.evaluate()
    return found


def test_evaluation_is_that_of_the_plain_trainer(tmp_path: Path) -> None:
    plain, private = evaluated(tmp_path, False), evaluated(tmp_path, True)
    assert plain["eval_accuracy"] >= 0.9
    assert private["eval_accuracy"] >= plain["eval_accuracy"] - 0.05
    assert private["eval_loss"] <= 1.15 * plain["eval_loss"] + 0.05


# -- summarization/run_summarization.py ----------------------------------------------------------


def summary(rng: Any) -> dict[str, Any]:
    topic = int(rng.integers(4))
    words = sentence(rng, range(16), 3, 8) + [f"w{16 + topic}"] * 2
    labels = encoded([f"w{20 + topic}"] * (1 + topic % 3))["input_ids"]
    return encoded(words, labels=labels)


def t5() -> nn.Module:
    """With its default dropout, and relative biases in its attention."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=1,
            num_heads=2,
            pad_token_id=0,
            eos_token_id=3,
            decoder_start_token_id=0,
        )
    )


def test_evaluation_generates_texts(tmp_path: Path) -> None:
    """``Seq2SeqTrainer``'s own evaluation: what is generated is the summary, word for word."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    model = t5()

    def exact(prediction: Any) -> dict[str, float]:
        found = TOKENIZER.batch_decode(prediction.predictions, skip_special_tokens=True)
        wanted = np.where(prediction.label_ids < 0, 0, prediction.label_ids)
        same = np.array(found) == TOKENIZER.batch_decode(wanted, skip_special_tokens=True)
        return {"exact": float(same.mean())}

    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=16,
        num_train_epochs=10,
        learning_rate=1e-2,
        predict_with_generate=True,
        generation_max_length=8,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = PrivateSeq2SeqTrainer(
        model,
        args,
        train_dataset=[summary(rng) for _ in range(128)],
        eval_dataset=[summary(rng) for _ in range(32)],
        data_collator=DataCollatorForSeq2Seq(TOKENIZER, model),
        compute_metrics=exact,
        privacy=privacy(noise_multiplier=0.01, max_grad_norm=1.0, accountant="rdp"),
    )
    assert trainer.evaluate()["eval_exact"] < 0.2
    trainer.train()
    assert trainer.evaluate()["eval_exact"] > 0.8
    assert trainer.run.steps == 80 and trainer.epsilon > 0
    assert trainer.predict(trainer.eval_dataset).metrics["test_exact"] > 0.8


def test_texts_are_generated_by_arguments_of_their_own(tmp_path: Path) -> None:
    with raises("FC809", ValueError, match="Seq2SeqTrainer"):
        PrivateSeq2SeqTrainer(t5(), privacy=privacy())
