"""Convolutions: ``g_b`` is an outer product of unfolded input patches and ``G``.

Shape suffixes: ``B`` samples, ``N`` samples and groups, ``p`` output channels of one group, ``d``
elements of what one of these sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_clipping.factors.base import Dense, Factor, accumulation_dtype
from flash_clipping.factors.linear import Outer
from flash_clipping.ops import certificate
from flash_clipping.ops.row_scale import row_scale
from flash_clipping.ops.runtime import cost
from flash_clipping.ops.runtime.backend import full_precision


class Convolution(Factor):
    """A convolution: ``g_b`` is an outer product of unfolded input patches and ``G``.

    The unfolded input is ``prod(kernel_size)`` times the input, so it is formed for a few samples
    at a time, used, and dropped. Either that gives the norms alone, and the clipped sum is one
    ordinary convolution backward on the scaled output gradient; or it gives the per-sample
    gradients, where they take no more memory than the ``x`` and ``G`` that they replace.
    """

    # Elements of unfolded input alive at once, unless one sample alone has more: few launches on
    # a GPU, what fits into a cache on a CPU.
    CHUNK_ELEMENTS = 1 << 24
    CHUNK_ELEMENTS_CPU = 1 << 18

    # Elements that oneDNN lays out anew for one call: less than it does for a whole batch.
    COPIED_ELEMENTS = 1 << 20

    def __init__(
        self,
        x: Tensor,
        G: Tensor,
        weight: Tensor,
        stride: tuple[int, ...],
        padding: Sequence[int],
        dilation: tuple[int, ...],
        groups: int,
    ):
        # x is [B, C, *spatial], padding is zeros on both sides; weight gives shape only.
        self.x = x
        self.G = G
        self.weight_shape = weight.shape
        self.stride = stride
        self.padding = list(padding)
        self.dilation = dilation
        self.groups = groups

    @property
    def batch_size(self) -> int:
        return self.G.shape[0]

    @property
    def _positions(self) -> int:
        return self.G.shape[2:].numel()

    def _chunks(self) -> list[slice]:
        elements = self.CHUNK_ELEMENTS_CPU if self.x.device.type == "cpu" else self.CHUNK_ELEMENTS
        per_sample = self._positions * self.x.shape[1] * self.weight_shape[2:].numel()
        step = max(1, elements // max(1, per_sample))
        return [slice(i, i + step) for i in range(0, self.batch_size, step)]

    def _outer(self, rows: slice) -> Outer:
        """The chunk as a linear map, each group a sample of its own: ``[B * groups, T, .]``."""
        x, G = self.x[rows], self.G[rows]
        spatial = x.dim() - 2
        if any(self.padding):
            x = F.pad(x, [pad for pad in reversed(self.padding) for _ in range(2)])
        patches = x
        for axis in range(spatial):
            span = (self.weight_shape[2 + axis] - 1) * self.dilation[axis] + 1
            patches = patches.unfold(2 + axis, span, self.stride[axis])
        every = [slice(None)] * (2 + spatial) + [slice(None, None, n) for n in self.dilation]
        patches = patches[tuple(every)]  # [B, C, *out, *kernel]
        n, positions = G.shape[0], self._positions
        d = self.weight_shape[1:].numel()
        if x.device.type == "cpu":
            # Copied along the positions, which lie together in x: several times as fast.
            out = tuple(range(2, 2 + spatial))
            kernel = tuple(range(2 + spatial, 2 + 2 * spatial))
            A = patches.permute(0, 1, *kernel, *out).reshape(n * self.groups, d, positions).mT
        else:  # [B, groups, *out, C / groups, *kernel]
            patches = patches.unflatten(1, (self.groups, -1)).movedim(2, 2 + spatial)
            A = patches.reshape(n * self.groups, positions, d)
        channels = self.weight_shape[0] // self.groups
        return Outer(A, G.reshape(n * self.groups, channels, positions).mT)

    def sqnorms(self, backend: str) -> Tensor:
        if self.batch_size == 0:
            return self.G.new_zeros(0, dtype=accumulation_dtype(self.G.dtype))
        parts = [self._outer(rows).sqnorms(backend) for rows in self._chunks()]
        return torch.cat(parts).view(self.batch_size, self.groups).sum(1)

    def doubt(self, backend: str) -> Tensor | None:
        if self.batch_size == 0:
            return None
        dtype = accumulation_dtype(self.G.dtype)
        # ‖patch‖² of every position and group: a convolution of squares with ones.
        spatial = self.weight_shape[2:]
        x_sq = self.x.to(dtype).square().unflatten(1, (self.groups, -1)).sum(2)
        ones = x_sq.new_ones((self.groups, 1, *spatial))
        with torch.no_grad(), full_precision(self.x.device):
            patch_sq = torch.convolution(
                x_sq,
                ones,
                None,
                self.stride,
                self.padding,
                self.dilation,
                False,
                [0] * len(spatial),
                self.groups,
            )
        G = self.G.unflatten(1, (self.groups, -1))
        norms = torch.linalg.vector_norm(G, dim=2, dtype=dtype)
        patch_sq += certificate.FLOOR * self.weight_shape[1:].numel()
        norms_sq = norms.square_().add_(certificate.FLOOR * G.shape[2])
        return certificate.doubt(norms_sq.mul_(patch_sq).sqrt_().flatten(1).sum(1))

    def is_worth_storing(self, readers: Callable[[], int]) -> bool:
        """Measured on CPUs only, where unfolding costs as much as the product that follows."""
        x, G, groups = self.x, self.G, self.groups
        if x.device.type != "cpu" or x.dtype != G.dtype or not self.batch_size:
            return False
        replaced = x[0].numel() + G[0].numel()  # the patches themselves are not kept
        if self.weight_shape.numel() > cost.STORE_BUDGET * replaced:
            return False
        d, p = self.weight_shape[1:].numel(), self.weight_shape[0] // groups
        B, T, itemsize = self.batch_size * groups, self._positions, G.element_size()
        algorithm = cost.choose_on("cpu", B, T, d, p, itemsize, may_store=True)
        return algorithm == "outer_store" and readers() > 0

    def stored(self, backend: str) -> Dense:
        """Form the per-sample gradients once, and let go of ``x`` and ``G``."""
        with torch.no_grad(), full_precision(self.G.device):
            grads = self._by_groups() if self._groups_are_fast() else self._by_patches()
            norm_B = torch.linalg.vector_norm(
                grads.flatten(1), dim=1, dtype=accumulation_dtype(grads.dtype)
            )
        return Dense(grads, norm_B.square_().unsqueeze(1))

    def _groups_are_fast(self) -> bool:
        """Whether oneDNN is there, whose kernels work on blocks of channels."""
        channels = (self.weight_shape[0] // self.groups, self.weight_shape[1])
        return (
            self.G.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
            and all(count % 8 == 0 for count in channels)
        )

    def _by_groups(self) -> Tensor:
        """A few samples as one with so many times the channels and groups: nothing is unfolded."""
        grads = self.G.new_empty((self.batch_size, *self.weight_shape))
        copied = self.x[:1].numel() + self.G[:1].numel() + self.weight_shape.numel()
        step = max(1, self.COPIED_ELEMENTS // max(1, copied))
        for x, G, out in zip(
            self.x.split(step), self.G.split(step), grads.split(step), strict=True
        ):
            groups = out.shape[0] * self.groups
            # The weight that is asked for gives shape only: the result's own place will do.
            out.flatten(0, 1).copy_(
                self._weight_grad(
                    x.reshape(1, -1, *x.shape[2:]),
                    G.reshape(1, -1, *G.shape[2:]),
                    out.flatten(0, 1),
                    groups,
                )
            )
        return grads

    def _by_patches(self) -> Tensor:
        B, groups = self.batch_size, self.groups
        grads = self.G.new_empty((B, *self.weight_shape))
        grads_Npd = grads.view(B * groups, self.weight_shape[0] // groups, -1)
        for rows in self._chunks():
            outer = self._outer(rows)
            chunk = slice(rows.start * groups, rows.stop * groups)
            torch.bmm(outer.G_BTp.mT, outer.A_BTd, out=grads_Npd[chunk])
        return grads

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        x, G, groups = self.x, self.G, self.groups
        if coef_B is None:
            return self._weight_grad(x, G, x.new_empty(self.weight_shape), groups)
        if x.is_cuda and groups == 1 and G.element_size() == 2:
            # Products of 16-bit operands are exact in fp32; a convolution would round their sum.
            parts = [
                self._outer(rows).clipped_sum(coef_B[rows], backend) for rows in self._chunks()
            ]
            return torch.stack(parts).sum(0).view(self.weight_shape)
        G = row_scale(G.contiguous(), coef_B, backend=backend)
        x = x.to(G.dtype)
        # The input is not scaled, so 0 * inf must be kept out of it as well. Only the CPU may
        # look whether there is such a sample; on a GPU looking would wait for the device.
        if coef_B.device.type != "cpu" or bool((coef_B == 0).any()):
            keep = (coef_B != 0).view(-1, *[1] * (x.dim() - 1))
            x = torch.where(keep, x, x.new_zeros(()))
        with torch.no_grad(), full_precision(G.device):
            return self._weight_grad(x, G, x.new_empty(self.weight_shape), groups)

    def _weight_grad(self, x: Tensor, G: Tensor, like: Tensor, groups: int) -> Tensor:
        """What PyTorch's own backward gives for a weight of this shape; its values are not read."""
        return torch.ops.aten.convolution_backward(
            G,
            x,
            like,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * (x.dim() - 2),
            groups,
            [False, True, False],
        )[1]

    def dense(self) -> Tensor:
        outer = self._outer(slice(None))
        return outer.dense().reshape(self.batch_size, *self.weight_shape)

    def dense_in_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """The same for a few samples at a time, in fp32 (float64 for float64)."""
        dtype = accumulation_dtype(self.G.dtype)
        for rows in self._chunks():
            outer = self._outer(rows)
            with full_precision(self.G.device):
                grads = outer.G_BTp.mT.to(dtype) @ outer.A_BTd.to(dtype)
            yield rows, grads.reshape(-1, *self.weight_shape)
