"""Small mixtures of experts of ``transformers``, one layer each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

VOCABULARY = 50

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    intermediate_size=24,
    num_experts_per_tok=2,
    attention_dropout=0.0,
)

_MLA: dict[str, Any] = dict(
    moe_intermediate_size=24,
    n_routed_experts=4,
    n_group=2,
    topk_group=2,
    first_k_dense_replace=0,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    qk_nope_head_dim=4,
)

#: Name of the model's family -> what its configuration has besides.
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": dict(num_local_experts=4),
    "Qwen2Moe": dict(moe_intermediate_size=24, shared_expert_intermediate_size=24, num_experts=4),
    "Qwen3Moe": dict(head_dim=8, moe_intermediate_size=24, num_experts=4),
    "Phimoe": dict(num_local_experts=4),
    "DeepseekV2": _MLA,
    "DeepseekV3": _MLA,
    "GptOss": dict(
        head_dim=8, num_local_experts=4, sliding_window=8, layer_types=["full_attention"]
    ),
    "Olmoe": dict(num_experts=4),
    "GraniteMoe": dict(num_local_experts=4),
    "Glm4Moe": dict(
        head_dim=8,
        moe_intermediate_size=24,
        n_routed_experts=4,
        n_group=2,
        topk_group=2,
        first_k_dense_replace=0,
    ),
    "MiniMax": dict(head_dim=8, num_local_experts=4, layer_types=["full_attention"], block_size=8),
}


def mixture(family: str, implementation: str = "eager") -> nn.Module:
    """A causal language model in float64, whose weights are all of ordinary size."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = getattr(transformers, f"{family}Config")(**(_COMMON | FAMILIES[family]))
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{family}ForCausalLM")(config)
    model.set_experts_implementation(implementation)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3 if param.dim() > 1 else 0.1)
    # PhiMoE draws its experts at random in training.
    return model.double().train(family != "Phimoe")  # type: ignore[no-any-return]


def tokens(samples: int = 5, positions: int = 7) -> tuple[Tensor, ...]:
    return (torch.randint(3, VOCABULARY, (samples, positions)),)


def language_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """The mean over samples."""
    (ids,) = batch
    logits = model(input_ids=ids, use_cache=False).logits
    losses = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
    return losses.mean()
