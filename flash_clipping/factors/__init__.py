"""What a per-sample gradient is made of; a file for each family of layers."""

from flash_clipping.factors.base import (
    DenseGrad as DenseGrad,
    PerSampleGrad as PerSampleGrad,
    accumulation_dtype as accumulation_dtype,
    merge as merge,
)
from flash_clipping.factors.convolution import ConvolutionGrad as ConvolutionGrad
from flash_clipping.factors.embedding import (
    EmbeddingBagGrad as EmbeddingBagGrad,
    EmbeddingGrad as EmbeddingGrad,
    TiedEmbeddingGrad as TiedEmbeddingGrad,
)
from flash_clipping.factors.linear import (
    LinearGrad as LinearGrad,
    StackedGrad as StackedGrad,
    SumGrad as SumGrad,
)
from flash_clipping.factors.units import UnitMap as UnitMap
