"""Layers to build models of. Each has a rule: wrapped or not, it computes the same."""

import sys
from importlib import import_module

from flash_clipping import ops as general
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

# The former paths of these layers' operations. They go with the next version.
for _name in ("hyper_connections", "product_key", "stream_mix"):
    _module = import_module(f"{__name__}.ops.{_name}")
    sys.modules[f"{general.__name__}.{_name}"] = _module
    setattr(general, _name, _module)
    vars(general).update(
        {name: getattr(_module, name) for name in vars(_module).get("__all__", ())}
    )
