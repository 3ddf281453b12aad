"""Hugging Face models as they are, with the sizes of models that people use and random weights.

Shapes are written as suffixes: B samples, T positions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workload import Named, Workload, draw_images, draw_tokens


class Logits(nn.Module):
    """A Hugging Face model as a map from its one input to logits; a decoder reads the input, too,
    where there is one beside an encoder."""

    def __init__(self, model: nn.Module, cls: str) -> None:
        super().__init__()
        self.model = model
        self.argument = "pixel_values" if "Image" in cls else "input_ids"
        self.seq2seq = "ConditionalGeneration" in cls
        self.options = {} if "Classification" in cls else {"use_cache": False}

    def forward(self, x: Tensor) -> Tensor:
        given = {self.argument: x} | ({"decoder_input_ids": x} if self.seq2seq else {})
        return self.model(**given, **self.options).logits


def transformer(
    name: str,
    *,
    cls: str,
    config: dict[str, Any],
    batch: int,
    seq: int,
    layers: int | None = None,
    checkpointing: bool = False,
    lora: int = 0,
) -> Workload:
    """A language model of this class of ``transformers``, trained on the next token, or a
    classifier of sequences into two classes.

    ``lora`` is the rank of PEFT's adapters on every linear layer but the head; 0 for none.
    """
    if "Classification" in cls:
        draw = functools.partial(draw_labelled, batch=batch, seq=seq, vocab=config["vocab_size"])
    else:
        draw = functools.partial(draw_tokens, batch=batch, seq=seq, vocab=config["vocab_size"])
    build = functools.partial(_build, cls, config, layers, checkpointing, lora)
    return Workload(name, build, draw, batch=batch, positions=seq)


def image_classifier(
    name: str, *, cls: str, config: dict[str, Any], batch: int, layers: int | None = None
) -> Workload:
    """Of images of 224 by 224, which are 197 tokens."""
    draw = functools.partial(draw_images, batch=batch, size=224, classes=config["num_labels"])
    build = functools.partial(_build, cls, config, layers)
    return Workload(name, build, draw, batch=batch, positions=197)


def _build(
    cls: str, config: dict[str, Any], layers: int | None, checkpointing: bool = False, lora: int = 0
) -> nn.Module:
    import transformers

    kind = getattr(transformers, cls)
    if layers is not None:
        depths = ("num_hidden_layers", "n_layer", "num_layers")
        config = config | {next(name for name in depths if name in config): layers}
    model = kind(kind.config_class(**config))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Logits(with_lora(model, lora) if lora else model, cls)


def with_lora(model: nn.Module, rank: int) -> nn.Module:
    """PEFT's adapters, as after some training: both factors have gradients."""
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    return adapted


def draw_labelled(
    generator: torch.Generator, *, batch: int, seq: int, vocab: int
) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, vocab, (batch, seq), generator=generator)  # no padding
    return ids, torch.randint(2, (batch,), generator=generator)


# --------------------------------------------------------------------------------------------------
# Names, and sizes
# --------------------------------------------------------------------------------------------------


def _sizes(vocab: int, width: int, hidden: int, layers: int, heads: int, keys: int) -> dict:
    return dict(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
    )


def _llama(batch: int, seq: int, *sizes: int, tied: bool = True, lora: int = 0) -> Any:
    config = _sizes(*sizes) | dict(tie_word_embeddings=tied)
    return _row("LlamaForCausalLM", config, batch, seq) | dict(lora=lora)


def _gpt2(batch: int, seq: int, layers: int, width: int, heads: int) -> Any:
    config = dict(vocab_size=50_257, n_embd=width, n_layer=layers, n_head=heads)
    config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _row("GPT2LMHeadModel", config, batch, seq)


def _row(cls: str, config: dict[str, Any], batch: int, seq: int) -> dict[str, Any]:
    config = config | dict(attn_implementation="sdpa")
    return dict(cls=cls, config=config, batch=batch, seq=seq)


NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
_LARGE = dict(
    hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
)
_QWEN3_MOE = dict(moe_intermediate_size=768, num_experts_per_tok=8, head_dim=128)
_GPT2 = {"small": (12, 768, 12), "medium": (24, 1024, 16), "large": (36, 1280, 20)}

#: E2E: the lengths to which published private fine-tuning on that data set pads its samples.
#: Qwen3-30B-A3B is here with fewer layers.
_LANGUAGE: dict[str, dict[str, Any]] = {
    "smollm-135m": _llama(32, 512, 49_152, 576, 1536, 30, 9, 3),
    "t5-base": dict(
        cls="T5ForConditionalGeneration",
        config=dict(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12)
        | dict(vocab_size=32_128, dropout_rate=0.0),
        batch=16,
        seq=128,
    ),
    "llama-3.2-1b": _llama(4, 1024, 128_256, 2048, 8192, 16, 32, 8),
    "llama-3.2-1b-untied": _llama(4, 1024, 128_256, 2048, 8192, 16, 32, 8, tied=False),
    "llama-3.2-3b": _llama(4, 1024, 128_256, 3072, 8192, 28, 24, 8),
    "llama-3-8b-lora": _llama(4, 1024, 128_256, 4096, 14_336, 32, 32, 8, tied=False, lora=16),
    "gpt2-medium": _gpt2(8, 1024, *_GPT2["medium"]),
    **{f"gpt2-{size}-e2e": _gpt2(16, 100, *sizes) for size, sizes in _GPT2.items()},
    "bert-base": _row(
        "BertForSequenceClassification",
        dict(vocab_size=30_522, num_hidden_layers=12) | NO_DROPOUT,
        64,
        128,
    ),
    "roberta-large": _row(
        "RobertaForSequenceClassification",
        dict(vocab_size=50_265, max_position_embeddings=514, type_vocab_size=1)
        | _LARGE
        | NO_DROPOUT,
        16,
        256,
    ),
    "mixtral-small": _row(
        "MixtralForCausalLM",
        _sizes(32_000, 1024, 3584, 4, 16, 4) | dict(num_local_experts=8, num_experts_per_tok=2),
        8,
        512,
    ),
    "qwen3-0.6b": _row(
        "Qwen3ForCausalLM",
        _sizes(151_936, 1024, 3072, 28, 16, 8) | dict(head_dim=128, tie_word_embeddings=True),
        8,
        1024,
    ),
    "qwen3-moe": _row(
        "Qwen3MoeForCausalLM",
        _sizes(151_936, 2048, 6144, 4, 32, 4) | _QWEN3_MOE | dict(num_experts=128),
        4,
        2048,
    ),
    "qwen3-moe-small": _row(
        "Qwen3MoeForCausalLM",
        _sizes(32_000, 1024, 6144, 8, 8, 4) | _QWEN3_MOE | dict(num_experts=32),
        8,
        512,
    ),
}
_VIT = _LARGE | NO_DROPOUT | dict(num_labels=1000, attn_implementation="sdpa")

NAMED: Named = {name: (transformer, row) for name, row in _LANGUAGE.items()}
NAMED["vit-large"] = (
    image_classifier,
    dict(cls="ViTForImageClassification", config=_VIT, batch=64),
)
