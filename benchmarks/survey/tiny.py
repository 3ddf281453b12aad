"""Configurations of ``transformers`` with a few features and layers: what a default one has is made
small by the names of its fields, and the same in the configurations that it is made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

#: Sizes by the names of fields, where a configuration has them. No two of what may stand beside the
#: batch (heads, positions, queries) are the batch's size.
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "type_vocab_size": 2,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim"), 32),
    **dict.fromkeys(("embedding_size", "projection_dim", "decoder_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    "head_dim": 8,
    "d_kv": 8,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dim_feedforward"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "num_labels": 5,
    "use_cache": False,
}

#: Parts of names whose numbers are probabilities of leaving something out: 0.
_CHANCE = ("drop", "mask_time_prob", "mask_feature_prob", "jitter")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def tiny(
    cls: Any, changes: Mapping[str, Any] | None = None, chance: bool = False
) -> dict[str, Any]:
    """Arguments that make a small configuration of this class.

    Args:
        cls: a ``PreTrainedConfig``.
        changes: fields with other values; a mapping, for a configuration inside, those of its own.
        chance: probabilities of leaving something out stay as they are.
    """
    changes = dict(changes or {})
    inner = {name: kind for name, kind in cls.sub_configs.items() if isinstance(kind, type)}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name = field.name
        if name in changes or name in inner:
            continue
        if name in SIZES:
            default = _default(field)
            if not isinstance(default, list | tuple):
                found[name] = SIZES[name]
            elif name in ("image_size", "patch_size"):
                found[name] = [SIZES[name]] * len(default)
        elif (
            not chance
            and any(part in name for part in _CHANCE)
            and isinstance(field.default, float)
        ):
            found[name] = 0.0
    for name, kind in inner.items():
        if hasattr(kind, "sub_configs") and name not in changes and kind.__name__ != "AutoConfig":
            found[name] = tiny(kind, None, chance)
        elif isinstance(changes.get(name), Mapping) and "model_type" not in changes[name]:
            found[name] = tiny(kind, changes.pop(name), chance)
    return {**found, **changes}
