"""What a per-sample gradient is made of; a file for each family of layers."""

from flash_clipping.factors.base import Dense, Factor, accumulation_dtype
from flash_clipping.factors.convolution import Convolution
from flash_clipping.factors.embedding import Bag, Lookup, TiedEmbedding
from flash_clipping.factors.linear import Outer
from flash_clipping.factors.merge import Rearranged, Stacked, merge
from flash_clipping.factors.scaled_lookup import ScaledLookup
from flash_clipping.factors.segmented import SegmentedOuter
from flash_clipping.factors.units import OfUnits, UnitMap, by_units
from flash_clipping.factors.vector import RowSum

__all__ = [
    "Bag",
    "Convolution",
    "Dense",
    "Factor",
    "Lookup",
    "OfUnits",
    "Outer",
    "Rearranged",
    "RowSum",
    "ScaledLookup",
    "SegmentedOuter",
    "Stacked",
    "TiedEmbedding",
    "UnitMap",
    "accumulation_dtype",
    "by_units",
    "merge",
]
