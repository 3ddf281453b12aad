"""What a per-sample gradient is made of; a file for each family of layers."""

# ruff: noqa: F401
from flash_clipping.factors.base import (
    DenseGrad,
    PerSampleGrad,
    UnitGrad,
    accumulation_dtype,
    merge,
)
from flash_clipping.factors.convolution import ConvolutionGrad as ConvolutionGrad
from flash_clipping.factors.embedding import EmbeddingBagGrad, EmbeddingGrad, TiedEmbeddingGrad
from flash_clipping.factors.linear import LinearGrad, StackedGrad, SumGrad
from flash_clipping.factors.units import UnitMap
