"""What a per-sample gradient is made of; a file for each family of layers."""

# ruff: noqa: F401
from flash_clipping.factors.base import DenseGrad, PerSampleGrad, accumulation_dtype
from flash_clipping.factors.convolution import ConvolutionGrad
from flash_clipping.factors.embedding import (
    EmbeddingBagGrad,
    EmbeddingGrad,
    ScaledEmbeddingGrad,
    TiedEmbeddingGrad,
)
from flash_clipping.factors.linear import LinearGrad, SegmentedLinearGrad, SumGrad
from flash_clipping.factors.merge import RearrangedGrad, StackedGrad, merge
from flash_clipping.factors.units import UnitGrad, UnitMap, by_units
