"""Layers of current language models, as modules; the rules of those with parameters are in
``flash_clipping/rules/``."""

from flash_clipping.layers.product_key_experts import ProductKeyExperts
from flash_clipping.layers.product_key_router import ProductKeyRouter

__all__ = ["ProductKeyExperts", "ProductKeyRouter"]
