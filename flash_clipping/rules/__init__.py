"""One file per layer family: what a layer computes and what its per-sample gradient is made of."""

from flash_clipping.rules import (  # noqa: F401
    attention,
    convolution,
    embedding,
    experts,
    linear,
    normalization,
    opacus_layers,
    own_layers,
    peft_experts,
)
from flash_clipping.rules.experts import is_list_of_experts
from flash_clipping.rules.registry import GradRequest, Rule, find_rule, find_scope, register_rule

__all__ = ["GradRequest", "Rule", "find_rule", "find_scope", "is_list_of_experts", "register_rule"]

Needs = GradRequest  # its earlier name, for this version
