"""The kernels for segments, by the names of :mod:`flash_clipping.ops.segments.reference`: nothing
here waits for how long segments are."""

from flash_clipping.ops.segments.norms import segment_sqnorms
from flash_clipping.ops.segments.products import (
    grouped_linear,
    products,
    segment_grads,
    sums_of_tokens,
)
from flash_clipping.ops.segments.row_sums import segment_sums
from flash_clipping.ops.segments.sums import grouped_sums

__all__ = [
    "grouped_linear",
    "grouped_sums",
    "products",
    "segment_grads",
    "segment_sqnorms",
    "segment_sums",
    "sums_of_tokens",
]
