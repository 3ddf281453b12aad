"""Layers to build models of. Each has a rule: wrapped or not, it computes the same."""

from flash_clipping.layers.hyper_connections import HyperConnections
from flash_clipping.layers.mixture_of_experts import MixtureOfExperts, RoutedExperts, TopKRouter

__all__ = [
    "HyperConnections",
    "MixtureOfExperts",
    "RoutedExperts",
    "TopKRouter",
]
