"""The recipes of Hugging Face's example scripts: what is learnt is what ``Trainer`` learns.

Default dropout, dynamic padding, accumulation, evaluation after every epoch. With noise of nearly 0
and a bound that no sample reaches, metrics of evaluation are those of the plain ``Trainer``.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    default_data_collator,
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


class Recipe:
    """What one script trains."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        data: Callable[[Any], Any],
        collate: Any,
        metric: Callable[[Any], dict[str, float]],
        better_than: float,
        *,
        size: int = 128,
        epochs: int = 6,
        learning_rate: float = 1e-2,
        **settings: Any,
    ):
        self.build, self.collate, self.metric = build, collate, metric
        self.better_than = better_than
        rng = np.random.default_rng(0)
        self.data = [data(rng) for _ in range(size)]
        self.evaluation = [data(rng) for _ in range(64)]
        self.settings = {"num_train_epochs": epochs, "learning_rate": learning_rate, **settings}

    def train(self, folder: Path, *, private: bool) -> dict[str, float]:
        """What evaluation finds after training."""
        torch.manual_seed(0)
        model = self.build()
        args = arguments(
            folder,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=16,
            gradient_accumulation_steps=2,
            max_grad_norm=1e4,
            eval_strategy="epoch",
            seed=1,
            **self.settings,
        )
        collate = self.collate
        if isinstance(collate, DataCollatorForSeq2Seq):
            collate = DataCollatorForSeq2Seq(TOKENIZER, model)
        given: dict[str, Any] = {
            "model": model,
            "args": args,
            "train_dataset": self.data,
            "eval_dataset": self.evaluation,
            "data_collator": collate,
            "compute_metrics": self.metric,
        }
        if not private:
            trainer = Trainer(**given)
        else:
            of_privacy = privacy(noise_multiplier=1e-7, accountant="rdp", target_delta=1e-3)
            trainer = PrivateTrainer(privacy=of_privacy, **given)
        trainer.train()
        if private:
            assert {reading.clipped_share for _, reading in trainer.run.readings} == {0.0}
        torch.manual_seed(2)  # masks of evaluation are drawn
        found: dict[str, float] = trainer.evaluate()
        return found


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    labels = prediction.label_ids
    counted = labels != -100
    return {"accuracy": float((logits.argmax(-1) == labels)[counted].mean())}


# -- text-classification/run_glue.py -------------------------------------------------------------


def glue(rng: Any) -> dict[str, Any]:
    label = int(rng.integers(2))
    return encoded(sentence(rng, range(16)) + [f"w{16 + label}"], labels=label)


# -- question-answering/run_qa.py, which pads to one length --------------------------------------


def qa(rng: Any) -> dict[str, Any]:
    words = sentence(rng, range(16))
    start = int(rng.integers(len(words)))
    words[start : start + 1] = ["w16", "w17"]
    row = TOKENIZER(
        " ".join(words), padding="max_length", max_length=14, return_token_type_ids=False
    )
    return {**row, "start_positions": 1 + start, "end_positions": 2 + start}


def exact_match(prediction: Any) -> dict[str, float]:
    found = np.stack([logits.argmax(-1) for logits in prediction.predictions[:2]])
    return {"accuracy": float((found == np.stack(prediction.label_ids[:2])).all(0).mean())}


# -- language-modeling/run_clm.py ----------------------------------------------------------------

TEXT = "".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")


def clm(rng: Any) -> dict[str, Any]:
    """A block of a text, as ``group_texts`` cuts them."""
    start = int(rng.integers(len(TEXT) - 32))
    block = list(TEXT[start : start + 32])
    return {"input_ids": block, "attention_mask": [1] * 32, "labels": block}


def next_token(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    right = logits[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean())}


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


# -- speech-recognition/run_speech_recognition_ctc.py --------------------------------------------


def sounds(rng: Any) -> tuple[list[int], np.ndarray]:
    """Letters 1 to 3, and the sound of each: a tone of its own, with a pause behind it."""
    letters = [int(x) for x in rng.integers(1, 4, rng.integers(2, 5))]
    time = np.arange(160)
    parts = [np.sin(time * 0.15 * 2**letter) * (time < 120) for letter in letters]
    return letters, np.concatenate(parts) + 0.05 * rng.standard_normal(160 * len(letters))


def speech(rng: Any) -> dict[str, Any]:
    letters, sound = sounds(rng)
    return {"input_values": torch.tensor(sound, dtype=torch.float32), "labels": letters}


def padded_speech(rows: list[Any]) -> dict[str, Tensor]:
    """As the script's ``DataCollatorCTCWithPadding``."""
    values = [row["input_values"] for row in rows]
    return {
        "input_values": nn.utils.rnn.pad_sequence(values, batch_first=True),
        "attention_mask": nn.utils.rnn.pad_sequence(
            [torch.ones(len(x), dtype=torch.long) for x in values], batch_first=True
        ),
        "labels": nn.utils.rnn.pad_sequence(
            [torch.tensor(row["labels"]) for row in rows], batch_first=True, padding_value=-100
        ),
    }


def wav2vec2() -> nn.Module:
    model = Wav2Vec2ForCTC(
        Wav2Vec2Config(
            vocab_size=4,
            pad_token_id=0,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            conv_dim=(32, 32),
            conv_kernel=(16, 4),
            conv_stride=(10, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            mask_time_prob=0.05,
            mask_time_length=2,
            mask_feature_prob=0.05,
            mask_feature_length=2,
            ctc_loss_reduction="mean",
        )
    )
    model.freeze_feature_encoder()  # the script's default
    return model


def letters_right(prediction: Any) -> dict[str, float]:
    """The share of texts whose letters are read in their order."""
    right = []
    for logits, labels in zip(prediction.predictions, prediction.label_ids, strict=True):
        # Frames of the sound alone: 160 values a letter, through the kernels and strides below.
        frames = ((160 * int((labels > 0).sum()) - 16) // 10 + 1 - 4) // 4 + 1
        best = logits[:frames].argmax(-1)
        read = [int(x) for i, x in enumerate(best) if x and (not i or best[i - 1] != x)]
        right.append(read == [int(x) for x in labels if x > 0])
    return {"accuracy": float(np.mean(right))}


PAD = DataCollatorWithPadding(TOKENIZER)
GPT2 = GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=1, n_head=2)

RECIPES: dict[str, Callable[[], Recipe]] = {
    "glue": lambda: Recipe(
        lambda: BertForSequenceClassification(BertConfig(**SIZES)), glue, PAD, accuracy, 0.9
    ),
    "qa": lambda: Recipe(
        lambda: BertForQuestionAnswering(BertConfig(**SIZES)),
        qa,
        default_data_collator,
        exact_match,
        0.9,
    ),
    "clm": lambda: Recipe(
        lambda: GPT2LMHeadModel(GPT2), clm, default_data_collator, next_token, 0.15
    ),
    "summarization, T5": lambda: Recipe(
        t5, summary, DataCollatorForSeq2Seq(TOKENIZER), accuracy, 0.8
    ),
    "ctc": lambda: Recipe(wav2vec2, speech, padded_speech, letters_right, 0.8, epochs=14),
}


#: The others take a minute together. What is generated after a training on summaries is looked at
#: below, losses of other models in test_model_loss.py.
QUICK = {"glue"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in RECIPES],
)
def test_evaluation_is_that_of_the_plain_trainer(tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]()
    plain = recipe.train(tmp_path, private=False)
    private = recipe.train(tmp_path, private=True)
    print(name, plain, private)
    assert plain["eval_accuracy"] >= recipe.better_than
    assert private["eval_accuracy"] >= plain["eval_accuracy"] - 0.05
    assert private["eval_loss"] <= 1.15 * plain["eval_loss"] + 0.05


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
