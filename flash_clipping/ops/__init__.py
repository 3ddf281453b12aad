"""Per-sample norms and clipped sums as plain functions on tensors.

Nothing here knows modules, autograd or Opacus. Every operation is a folder: ``__init__.py`` (the
public function: checks, choice of backend), ``reference.py`` (the readable mathematics, which is
also the CPU path and the fallback) and ``triton.py`` (the kernel, behind functions that are named
and called as those of the reference); ``hopper.py`` where that GPU has a kernel of its own.
``linear`` chooses between ``gram`` and ``outer``, ``error_bounds`` covers what norms lose to
rounding. ``runtime`` holds what they share.
"""

from flash_clipping.ops.clipped_sum import clipped_sums
from flash_clipping.ops.embedding import embedding_clipped_sum, embedding_sqnorms, tied_cross_term
from flash_clipping.ops.gram import gram_sqnorms
from flash_clipping.ops.linear import linear_sqnorms
from flash_clipping.ops.norm_layer import group_norm_grads, norm_backward
from flash_clipping.ops.outer import outer_sqnorms, weighted_sum
from flash_clipping.ops.rows import row_scale
from flash_clipping.ops.runtime.backend import TritonFallbackWarning, is_triton_available

__all__ = [
    "TritonFallbackWarning",
    "clipped_sums",
    "embedding_clipped_sum",
    "embedding_sqnorms",
    "gram_sqnorms",
    "group_norm_grads",
    "is_triton_available",
    "linear_sqnorms",
    "norm_backward",
    "outer_sqnorms",
    "row_scale",
    "tied_cross_term",
    "weighted_sum",
]
