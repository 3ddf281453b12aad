"""``PrivateTrainer`` before another trainer: TRL's, whose arguments have an order of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer

from flash_clipping import per_sample_loss
from flash_clipping.trainers.transformers import PrivateTrainer
from tests.support.trainers import Texts, arguments, bert, privacy

pytestmark = [
    pytest.mark.filterwarnings("ignore:GDP accounting is experimental"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
]

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
    with pytest.raises(ValueError, match="no args; expected those of WithReference"):
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


def test_trl(tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")

    class PrivateSFT(PrivateTrainer, trl.SFTTrainer):  # type: ignore[misc, name-defined]
        def compute_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            inputs = dict(inputs)
            labels = inputs.pop("labels")
            return per_sample_loss(model(**inputs), labels, shift=True)

    data = datasets.Dataset.from_dict({"text": ["a b c d", "e f g", "h a b c d"] * 4})
    args = trl.SFTConfig(output_dir=str(tmp_path), gradient_checkpointing=False, **SETTINGS)
    private = PrivateSFT(llama(), args, None, data, processing_class=tokenizer(), privacy=privacy())
    private.train()
    assert private.run.steps == private.state.global_step == 2
    assert private.run.sample_rate == 1 / 2

    class PrivateDPO(PrivateTrainer, trl.DPOTrainer):  # type: ignore[misc, name-defined]
        def compute_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            raise NotImplementedError

    rows = {"prompt": ["a b"] * 6, "chosen": [" c d"] * 6, "rejected": [" e f g"] * 6}
    data, reference = datasets.Dataset.from_dict(rows), llama()
    args = trl.DPOConfig(output_dir=str(tmp_path), gradient_checkpointing=False, **SETTINGS)
    private = PrivateDPO(
        llama(), reference, args, None, data, processing_class=tokenizer(), privacy=privacy()
    )
    assert private.ref_model is reference
    assert isinstance(private.args, trl.DPOConfig)
