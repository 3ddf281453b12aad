"""Convolutions: ``g_b`` is an outer product of unfolded input patches and ``G``.

Shape suffixes: ``B`` samples, ``N`` samples and groups, ``p`` output channels of one group, ``d``
elements of what one of these sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from flash_clipping.factors.base import DenseGrad, Factored, PerSampleGrad, accumulation_dtype
from flash_clipping.factors.units import UnitMap
from flash_clipping.ops import error_bounds
from flash_clipping.ops.convolution import (
    Geometry,
    convolution_grads,
    convolution_sqnorms,
    convolution_sum,
    laid_out,
    reference,
)
from flash_clipping.ops.runtime import cost
from flash_clipping.ops.runtime.backend import convolves_in_tf32, full_precision


class ConvolutionGrad(Factored):
    """A convolution: ``g_b`` is an outer product of unfolded input patches and ``G``.

    The unfolded input is ``prod(kernel_size)`` times the input. On a GPU it is never formed
    (:mod:`flash_clipping.ops.convolution`); on a CPU for a few samples at a time. Either that gives
    norms and, later, the clipped sum; or it gives the per-sample gradients, where they take no more
    memory than the ``x`` and ``G`` that they replace.
    """

    def __init__(
        self,
        x: Tensor,
        G: Tensor,
        weight: Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ):
        # x is [B, C, *spatial], padding is zeros on both sides; weight gives shape only.
        self.x = x
        self.G = G
        self.weight_shape = weight.shape
        self.geometry = Geometry(
            tuple(weight.shape[2:]), tuple(stride), tuple(padding), tuple(dilation), groups
        )
        # Norms and sums must be of the same operands, so this is asked once. Depthwise ones leave
        # nothing for tensor cores to do.
        alone = self.geometry.is_depthwise(x)
        self.tf32 = not alone and convolves_in_tf32(x) and convolves_in_tf32(G)

    @property
    def batch_size(self) -> int:
        return self.G.shape[0]

    def measure(self, backend: str) -> tuple[Tensor, Tensor | None]:
        # The clipped sum will want them so as well.
        self.x, self.G = laid_out(self.x, self.G, self.geometry, backend=backend)
        return convolution_sqnorms(self.x, self.G, self.geometry, tf32=self.tf32, backend=backend)

    def spread(self) -> Tensor:
        """``Σ_t ‖patch_t‖ ‖g_t‖``, ``[B]``."""
        with torch.no_grad(), full_precision(self.G.device):
            return reference.spread(self.x, self.G, self.geometry)

    def is_worth_storing(self, readers: Callable[[], int]) -> bool:
        x, G = self.x, self.G
        like = x.dtype, G.dtype, G.device.type
        return fits(x.shape, G.shape, self.weight_shape, *like) and readers() > 0

    def stored(self, backend: str) -> DenseGrad:
        """Form the per-sample gradients once, and let go of ``x`` and ``G``."""
        grads = convolution_grads(self.x, self.G, self.geometry, tf32=self.tf32, backend=backend)
        return DenseGrad(*grads)

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        if coef_B is None:
            return reference.weight_grad(self.x, self.G, self.geometry)
        return convolution_sum(
            self.x, self.G, coef_B, self.geometry, tf32=self.tf32, backend=backend
        )

    def dense(self) -> Tensor:
        A_NTd, G_NTp = reference.unfolded(self.x, self.G, self.geometry)
        return (G_NTp.mT @ A_NTd).reshape(self.batch_size, *self.weight_shape)

    def by_units(self, units: UnitMap) -> PerSampleGrad:
        self.tf32 = False  # gradients of units are added up of those that PyTorch forms
        return super().by_units(units)

    def measure_units(self, units: UnitMap, backend: str) -> tuple[Tensor, Tensor]:
        sums_U, sq_M = self._sums_of_units(units)
        sq_U = DenseGrad(sums_U).sqnorms(backend)
        if not sq_M.is_cpu:  # other products are released than were measured
            return sq_U, error_bounds.error_bound(units.sums(self.spread().unsqueeze(1))[:, 0])
        # Rows are added up in turn.
        spread_U = units.sums(sq_M.sqrt().unsqueeze(1))[:, 0]
        return sq_U, error_bounds.doubt_of_sums(sq_U, spread_U, 128 * len(units))

    def sums_of_units(self, units: UnitMap) -> Tensor:
        return self._sums_of_units(units)[0]

    def _sums_of_units(self, units: UnitMap) -> tuple[Tensor, Tensor]:
        """Gradients of units, and squared norms of those of rows. A chunk at a time: all rows'
        gradients at once would be the largest tensor of the step."""
        dtype = accumulation_dtype(self.G.dtype)
        sums_U = self.G.new_zeros((units.count, *self.weight_shape), dtype=dtype)
        sq_M = self.G.new_zeros(len(units), dtype=dtype)
        for chunk, grads in self.dense_in_chunks():
            sums_U += UnitMap(units.index_M[chunk], units.count).sums(grads)
            sq_M[chunk] = error_bounds.squared_norms(grads)
        return sums_U, sq_M

    def clipped_sum_of_units(self, units: UnitMap, coef_U: Tensor, backend: str) -> Tensor:
        if not self.G.is_cpu:
            return super().clipped_sum_of_units(units, coef_U, backend)
        dtype = accumulation_dtype(self.G.dtype)
        coef_M = units.of_rows(coef_U).to(dtype)
        return reference.weighted_sum(self.dense_in_chunks(), coef_M, self.weight_shape, dtype)

    def dense_in_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Per-sample gradients of a few samples at a time, in fp32 (float64 for float64)."""
        chunks = reference.grads_in_chunks(self.x, self.G, self.geometry)
        while True:
            with full_precision(self.G.device):
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk


@lru_cache(maxsize=1024)
def fits(
    x: torch.Size, G: torch.Size, weight: torch.Size, of_x: torch.dtype, of_G: torch.dtype, on: str
) -> bool:
    """Whether per-sample gradients of this shape are cheapest to form at once, and take no more
    memory than the operands; the patches themselves are not kept."""
    if (
        of_x != of_G
        or not x[0]
        or weight.numel() > cost.STORE_BUDGET * (x[1:].numel() + G[1:].numel())
    ):
        return False
    groups = x[1] // weight[1]
    if on == "cuda" and groups == x[1]:
        return True  # depthwise: a kernel forms them at once, whatever is asked for
    d, p, T = weight[1:].numel(), weight[0] // groups, G[2:].numel()
    algorithm = cost.choose_for_convolution(on, x[0] * groups, T, d, p, of_G.itemsize)
    return algorithm == "outer_store"
