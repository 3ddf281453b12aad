"""Layers to build models of. Each has a rule: wrapped or not, it computes the same."""

from flash_clipping.layers.hyper_connections import HyperConnections
from flash_clipping.layers.mixture_of_experts import MixtureOfExperts, RoutedExperts, TopKRouter
from flash_clipping.layers.product_key_experts import ProductKeyExperts, ProductKeyRouter

__all__ = [
    "HyperConnections",
    "MixtureOfExperts",
    "ProductKeyExperts",
    "ProductKeyRouter",
    "RoutedExperts",
    "TopKRouter",
]
