"""One file per layer family: what a layer computes and what its per-sample gradient is made of."""

from flash_clipping.rules import convolution, embedding, linear, normalization  # noqa: F401
from flash_clipping.rules.registry import Needs, Rule, find_rule, register_rule

__all__ = ["Needs", "Rule", "find_rule", "register_rule"]
