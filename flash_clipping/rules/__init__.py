"""One file per layer family: what a layer computes and what its per-sample gradient is made of."""

from flash_clipping.rules import (  # noqa: F401
    attention,
    convolution,
    embedding,
    experts,
    linear,
    normalization,
    opacus_layers,
    product_key_experts,
)
from flash_clipping.rules.registry import Needs, Rule, find_rule, find_scope, register_rule

__all__ = ["Needs", "Rule", "find_rule", "find_scope", "register_rule"]
