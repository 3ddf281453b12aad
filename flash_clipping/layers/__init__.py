"""Layers of current language models, with kernels of their own: private when wrapped, and ordinary
modules when not."""

from flash_clipping.layers.hyper_connections import HyperConnections

__all__ = ["HyperConnections"]
