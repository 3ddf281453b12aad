"""Layers to build models of. Each has a rule: wrapped or not, it computes the same."""

from flash_clipping.layers.mixture_of_experts import MixtureOfExperts, RoutedExperts, TopKRouter

__all__ = [
    "MixtureOfExperts",
    "RoutedExperts",
    "TopKRouter",
]
