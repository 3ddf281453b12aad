"""One file per layer family: what a layer computes and what its per-sample gradient is made of."""

from flash_clipping.rules import (  # noqa: F401
    attention,
    convolution,
    embedding,
    linear,
    normalization,
    opacus_layers,
)
from flash_clipping.rules.registry import GradRequest, Rule, find_rule, register_rule

__all__ = ["GradRequest", "Rule", "find_rule", "register_rule"]
