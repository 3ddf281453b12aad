"""Hugging Face models as they are, with the sizes of models that people use and random weights.

Shapes are written as suffixes: B samples, T positions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import Workload, draw_images, draw_tokens


class Logits(nn.Module):
    """A Hugging Face model as a map from its one input to logits."""

    def __init__(self, model: nn.Module, argument: str, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.argument = argument
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return self.model(**{self.argument: x}, **self.options).logits


def causal_lm(
    name: str,
    kind: str,
    config: dict[str, Any],
    *,
    batch: int,
    seq: int,
    checkpointing: bool,
    lora: int = 0,
) -> Workload:
    """A language model of this class of ``transformers``, trained on the next token.

    ``lora`` is the rank of PEFT's adapters on every linear layer but the head; 0 for none.
    """

    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, f"{kind}Config")(**config, attn_implementation="sdpa")
        model = getattr(transformers, LANGUAGE_MODELS[kind])(made)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            model = with_lora(model, lora)
        return Logits(model, "input_ids", use_cache=False)

    draw = functools.partial(draw_tokens, batch=batch, seq=seq, vocab=config["vocab_size"])
    return Workload(name, build, draw, batch=batch, positions=seq)


def with_lora(model: nn.Module, rank: int) -> nn.Module:
    """PEFT's adapters, as after some training: both factors have gradients."""
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    return adapted


LANGUAGE_MODELS = {
    "Llama": "LlamaForCausalLM",
    "Mixtral": "MixtralForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "Qwen3": "Qwen3ForCausalLM",
    "Qwen3Moe": "Qwen3MoeForCausalLM",
}


def qwen3_moe(
    name: str,
    *,
    batch: int = 4,
    seq: int = 2048,
    layers: int = 4,
    checkpointing: bool = False,
    vocab: int = 151_936,
    width: int = 2048,
    experts: int = 128,
    heads: int = 32,
) -> Workload:
    """Qwen3-30B-A3B, by default with fewer layers: 128 experts, 8 for each token."""
    config = {
        "vocab_size": vocab,
        "hidden_size": width,
        "moe_intermediate_size": 768,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    return causal_lm(name, "Qwen3Moe", config, batch=batch, seq=seq, checkpointing=checkpointing)


def qwen3(
    name: str, *, batch: int = 8, seq: int = 1024, layers: int = 28, checkpointing: bool = False
) -> Workload:
    """Qwen3-0.6B: queries and keys are normalised, its embedding is tied to the head."""
    config = {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    }
    return causal_lm(name, "Qwen3", config, batch=batch, seq=seq, checkpointing=checkpointing)


def llama_3_2(
    name: str,
    *,
    batch: int = 4,
    seq: int = 1024,
    layers: int = 16,
    checkpointing: bool = False,
    tied: bool = True,
    width: int = 2048,
    heads: int = 32,
) -> Workload:
    """Llama 3.2, by default 1B: grouped queries, SwiGLU, a vocabulary of 128k, tied to the head."""
    config = {
        "vocab_size": 128256,
        "hidden_size": width,
        "intermediate_size": 8192,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "tie_word_embeddings": tied,
    }
    return causal_lm(name, "Llama", config, batch=batch, seq=seq, checkpointing=checkpointing)


def smollm(
    name: str, *, batch: int = 32, seq: int = 512, layers: int = 30, checkpointing: bool = False
) -> Workload:
    """SmolLM-135M: narrow and deep, its embedding tied to the head."""
    config = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    }
    return causal_lm(name, "Llama", config, batch=batch, seq=seq, checkpointing=checkpointing)


class Copied(nn.Module):
    """An encoder and a decoder that both read the input: its logits are the decoder's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x, decoder_input_ids=x, use_cache=False).logits


def t5_base(name: str, *, batch: int = 16, seq: int = 128, layers: int = 12) -> Workload:
    """T5-base, with relative biases in its attention and without dropout."""

    def build() -> nn.Module:
        import transformers

        config = transformers.T5Config(
            d_model=768,
            d_kv=64,
            d_ff=3072,
            num_layers=layers,
            num_heads=12,
            vocab_size=32_128,
            dropout_rate=0.0,
        )
        return Copied(transformers.T5ForConditionalGeneration(config))

    draw = functools.partial(draw_tokens, batch=batch, seq=seq, vocab=32_128)
    return Workload(name, build, draw, batch=batch, positions=seq)


def llama_8b_lora(
    name: str, *, batch: int = 4, seq: int = 1024, layers: int = 32, checkpointing: bool = False
) -> Workload:
    """Llama 3 8B with PEFT's LoRA of rank 16 on every linear layer but the head."""
    config = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }
    shape: dict[str, Any] = dict(batch=batch, seq=seq, checkpointing=checkpointing)
    return causal_lm(name, "Llama", config, lora=16, **shape)


def mixtral_small(
    name: str, *, batch: int = 8, seq: int = 512, layers: int = 4, checkpointing: bool = False
) -> Workload:
    """A narrow Mixtral: 8 experts, 2 for each token."""
    config = {
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    return causal_lm(name, "Mixtral", config, batch=batch, seq=seq, checkpointing=checkpointing)


#: Layers, width and heads.
GPT2_SIZES = {"small": (12, 768, 12), "medium": (24, 1024, 16), "large": (36, 1280, 20)}


def gpt2(
    name: str,
    *,
    size: str = "medium",
    batch: int = 8,
    seq: int = 1024,
    layers: int | None = None,
    checkpointing: bool = False,
) -> Workload:
    """GPT-2 without dropout, its embedding tied to the head."""
    depth, width, heads = GPT2_SIZES[size]
    config = {
        "vocab_size": 50257,
        "n_embd": width,
        "n_layer": layers or depth,
        "n_head": heads,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return causal_lm(name, "GPT2", config, batch=batch, seq=seq, checkpointing=checkpointing)


def classifier(
    name: str, kind: str, config: dict[str, Any], *, batch: int, seq: int, vocab: int
) -> Workload:
    """A classifier of sequences into two classes, without dropout."""

    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, f"{kind}Config")(
            **config,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",
        )
        model = getattr(transformers, f"{kind}ForSequenceClassification")(made)
        return Logits(model, "input_ids")

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = torch.randint(3, vocab, (batch, seq), generator=generator)  # no padding
        return ids, torch.randint(2, (batch,), generator=generator)

    return Workload(name, build, draw, batch=batch, positions=seq)


def bert_base(name: str, *, batch: int = 64, seq: int = 128, layers: int = 12) -> Workload:
    """A BERT-base classifier."""
    config = {"num_hidden_layers": layers}
    return classifier(name, "Bert", config, batch=batch, seq=seq, vocab=30_522)


def roberta_large(name: str, *, batch: int = 16, seq: int = 256, layers: int = 24) -> Workload:
    """A RoBERTa-large classifier, on the lengths to which GLUE's tasks are padded."""
    config = {
        "vocab_size": 50_265,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "hidden_size": 1024,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }
    return classifier(name, "Roberta", config, batch=batch, seq=seq, vocab=50_265)


def vit_large(name: str, *, batch: int = 64, layers: int = 24) -> Workload:
    """ViT-L/16 on images of 224 by 224, without dropout."""

    def build() -> nn.Module:
        import transformers

        config = transformers.ViTConfig(
            hidden_size=1024,
            num_hidden_layers=layers,
            num_attention_heads=16,
            intermediate_size=4096,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=1000,
            attn_implementation="sdpa",
        )
        return Logits(transformers.ViTForImageClassification(config), "pixel_values")

    draw = functools.partial(draw_images, batch=batch, size=224, classes=1000)
    return Workload(name, build, draw, batch=batch, positions=197)
