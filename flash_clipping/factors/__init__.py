"""What a per-sample gradient is made of; a file for each family of layers."""

# ruff: noqa: F401
from flash_clipping.factors.base import Dense, Factor, accumulation_dtype
from flash_clipping.factors.convolution import Convolution
from flash_clipping.factors.embedding import Bag, Lookup, ScaledLookup, TiedEmbedding
from flash_clipping.factors.linear import Outer, RowSum, SegmentedOuter
from flash_clipping.factors.merge import Rearranged, Stacked, merge
from flash_clipping.factors.units import OfUnits, UnitMap, by_units
