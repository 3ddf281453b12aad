"""Tiny models and data for trainers."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)

from flash_clipping import Kernels
from flash_clipping.trainers.transformers import PrivacyArguments, PrivateTrainer

POSITIONS = 6


def bert(dtype: torch.dtype = torch.float32, **config: Any) -> BertForSequenceClassification:
    settings = dict(
        vocab_size=31,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=POSITIONS,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**(settings | config))).to(dtype)


WORDS = ["[PAD]", "[UNK]", "[END]", *"abcdefgh"]


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            pad_token_id=0,
            eos_token_id=2,
        )
    )


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", eos_token="[END]"
    )


class Texts(Dataset):
    """Tokens of different lengths, a class, and a column that no model takes."""

    def __init__(self, size: int):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, 31, (size, POSITIONS), generator=generator)
        self.lengths = torch.randint(2, POSITIONS + 1, (size,), generator=generator)
        self.labels = torch.randint(0, 3, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (torch.arange(POSITIONS) < self.lengths[index]).long()
        return {
            "input_ids": self.tokens[index] * mask,
            "attention_mask": mask,
            "labels": self.labels[index],
            "index": torch.tensor(index),
        }


def privacy(**settings: Any) -> PrivacyArguments:
    defaults: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "target_delta": 1e-3,
        "accountant": "gdp",  # the quickest
        "seed": 0,
    }
    return PrivacyArguments(**(defaults | settings))


def arguments(folder: Any, **settings: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "save_strategy": "no",
        "logging_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(folder), **(defaults | settings))


def trainer(
    folder: Any,
    model: nn.Module | None = None,
    *,
    size: int = 20,
    of_privacy: dict[str, Any] | None = None,
    cls: type[PrivateTrainer] = PrivateTrainer,
    more: dict[str, Any] | None = None,
    **settings: Any,
) -> PrivateTrainer:
    given: dict[str, Any] = {"train_dataset": Texts(size), "eval_dataset": Texts(7)}
    return cls(
        model=model if model is not None else bert(),
        args=arguments(folder, **settings),
        privacy=privacy(**(of_privacy or {})),
        **(given | (more or {})),
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class _CountsReplays(TrainerCallback):
    def __init__(self, private: PrivateTrainer) -> None:
        self.private, self.count = private, 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        graphs = self.private.run.hooks._graphs
        self.count = 0 if graphs is None else graphs.replays


def trained_with(folder: Any, graphs: str, **settings: Any) -> tuple[list[Tensor], int]:
    """Weights after twelve steps with ``cuda_graphs=graphs``, and how many calls were replays."""
    kernels = Kernels(cuda_graphs=graphs)
    private = trainer(
        folder,
        bert(),
        of_privacy={"kernels": kernels},
        num_train_epochs=3,
        optim="sgd",
        **settings,
    )
    count = _CountsReplays(private)
    private.add_callback(count)
    private.train()
    assert private.model._compiled_call_impl is None
    return [*weights(private.model).values()], count.count
