"""Per-sample norms and clipped sums as plain functions on tensors.

Nothing here knows modules, autograd or Opacus. An operation with a kernel is in ``<op>.py`` (the
public function: checks, cost model, choice of backend), ``<op>_torch.py`` (the readable reference,
which is also the CPU path and the fallback) and ``<op>_triton.py`` (the kernel).
"""

from flash_clipping.ops.backend import TritonFallbackWarning, is_triton_available
from flash_clipping.ops.clipped_sum import clipped_sums
from flash_clipping.ops.embedding import (
    embedding_clipped_sum,
    embedding_sqnorms,
    tied_cross_term,
)
from flash_clipping.ops.gram import gram_sqnorms
from flash_clipping.ops.linear import linear_sqnorms
from flash_clipping.ops.norm_layer import group_norm_grads, norm_backward
from flash_clipping.ops.outer import outer_sqnorms, weighted_sum
from flash_clipping.ops.row_scale import row_scale

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
