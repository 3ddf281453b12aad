"""Reference for convolutions: windows are unfolded for a few samples at a time, and multiplied.

B samples, N samples and groups, T output positions, p output channels of one group, d elements of
what one of these sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_clipping.ops import error_bounds
from flash_clipping.ops.convolution.geometry import Geometry
from flash_clipping.ops.linear import linear_sqnorms
from flash_clipping.ops.outer.reference import weighted_sums_many
from flash_clipping.ops.rows.reference import row_scale
from flash_clipping.ops.runtime.shapes import accumulator

CHUNK_ELEMENTS = 1 << 24
CHUNK_ELEMENTS_CPU = 1 << 18
"""Elements of unfolded input alive at once, unless one sample alone has more: few launches on a
GPU, what fits into a cache on a CPU."""

COPIED_ELEMENTS = 1 << 20
"""Elements that oneDNN lays out again for one call: less than it does for a whole batch."""


def laid_out(x: Tensor, G: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """See :func:`flash_clipping.ops.convolution.laid_out`."""
    return x, G


def cut(x: Tensor) -> Tensor:
    """fp32 numbers without the 13 bits that TF32 does not have, as tensor cores read them. What is
    not finite stays so."""
    return x.view(torch.int32).bitwise_and(-(1 << 13)).view(torch.float32)


def _operands(x: Tensor, G: Tensor, tf32: bool) -> tuple[Tensor, Tensor]:
    return (cut(x), cut(G)) if tf32 and x.dtype == torch.float32 else (x, G)


def convolution_sqnorms(
    x: Tensor, G: Tensor, geometry: Geometry, tf32: bool = False
) -> tuple[Tensor, Tensor | None]:
    """See :func:`flash_clipping.ops.convolution.convolution_sqnorms`."""
    if not len(G):
        return G.new_zeros((0, 1), dtype=accumulator(G)), None
    x, G = _operands(x, G, tf32)
    if _adds_up_samples(G):
        grads = grads_in_chunks(x, G, geometry)
        found = [error_bounds.squared_norms(some) for _, some in grads]
        return torch.cat(found).unsqueeze(1), None
    found = []
    for rows in chunks(x, G, geometry):
        A_NTd, G_NTp = unfolded(x[rows], G[rows], geometry)
        ((sq_1N, _),) = linear_sqnorms([(A_NTd, [G_NTp])], backend="torch")
        found.append(sq_1N[0])
    sq_B = torch.cat(found).view(len(G), geometry.groups).sum(1)
    positions, cores = G.shape[2:].numel(), error_bounds.cores_of(x, G)
    doubt_B = error_bounds.doubt_of_sums(sq_B, spread(x, G, geometry), positions, cores)
    return sq_B.unsqueeze(1), doubt_B


def _adds_up_samples(G: Tensor) -> bool:
    """Whether sums are added up from the gradients of samples, as these were measured: on a CPU,
    which may add up all positions of all samples in turn."""
    return G.is_cpu and G.shape[2:].numel() > error_bounds.APART


def spread(x: Tensor, G: Tensor, geometry: Geometry) -> Tensor:
    """``Σ_t ‖patch_t‖ ‖g_t‖``, ``[B]``."""
    dtype = accumulator(x, G)
    # ‖patch‖² of every position and group: a convolution of squares with ones.
    x_sq = x.to(dtype).square().unflatten(1, (geometry.groups, -1)).sum(2)
    ones = x_sq.new_ones((geometry.groups, 1, *geometry.kernel))
    patch_sq: Tensor = torch.ops.aten.convolution(x_sq, ones, None, *geometry.settings())
    G = G.unflatten(1, (geometry.groups, -1))
    norms: Tensor = torch.linalg.vector_norm(G, dim=2, dtype=dtype)
    per_group = x.shape[1] // geometry.groups
    patch_sq += error_bounds.FLOOR * (per_group * geometry.offsets)
    norms_sq = norms.square_().add_(error_bounds.FLOOR * G.shape[2])
    return norms_sq.mul_(patch_sq).sqrt_().flatten(1).sum(1)


def convolution_grads(
    x: Tensor, G: Tensor, geometry: Geometry, tf32: bool = False
) -> tuple[Tensor, Tensor | None]:
    """See :func:`flash_clipping.ops.convolution.convolution_grads`."""
    grads = _grads(*_operands(x, G, tf32), geometry)
    return grads, error_bounds.squared_norms(grads, accumulator(grads)).unsqueeze(1)


def _grads(x: Tensor, G: Tensor, geometry: Geometry) -> Tensor:
    channels = G.shape[1] // geometry.groups, x.shape[1] // geometry.groups
    on_onednn = x.is_cpu and G.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    # Whose kernels work on blocks of channels.
    way = by_groups if on_onednn and not any([n % 8 for n in channels]) else by_patches
    return way(x, G, geometry)


def grads_in_chunks(x: Tensor, G: Tensor, geometry: Geometry) -> Iterator[tuple[slice, Tensor]]:
    """Per-sample gradients of a few samples at a time, in fp32 (float64 for float64); the same
    whenever they are formed."""
    dtype = accumulator(x, G)
    elements = max(1, math.prod(geometry.weight_shape(x, G)))
    most = CHUNK_ELEMENTS_CPU if x.is_cpu else CHUNK_ELEMENTS
    for rows in chunks(x, G, geometry, max(1, most // elements)):
        yield rows, _grads(x[rows].to(dtype), G[rows].to(dtype), geometry)


def weighted_sum(
    chunks: Iterator[tuple[slice, Tensor]], coef_B: Tensor, like: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """``Σ_b coef_b g_b`` of gradients that come in chunks; samples whose coefficient is 0 add
    nothing, whatever they hold."""
    total = coef_B.new_zeros(like, dtype=dtype)
    for rows, grads in chunks:
        total += weighted_sums_many([grads], coef_B[rows])[0]
    return total


def convolution_sum(
    x: Tensor, G: Tensor, coef_B: Tensor, geometry: Geometry, tf32: bool = False
) -> Tensor:
    """See :func:`flash_clipping.ops.convolution.convolution_sum`."""
    x, G = _operands(x, G, tf32)
    if _adds_up_samples(G):
        shape, dtype = geometry.weight_shape(x, G), accumulator(x, G)
        return weighted_sum(grads_in_chunks(x, G, geometry), coef_B, shape, dtype)
    G = row_scale(G, coef_B)
    x = x.to(G.dtype)
    # The input is not scaled, so 0 * inf must be kept out of it as well. Only the CPU may look
    # whether there is such a sample; on a GPU looking would wait for the device.
    if coef_B.device.type != "cpu" or bool((coef_B == 0).any()):
        keep = (coef_B != 0).view(-1, *[1] * (x.dim() - 1))
        x = torch.where(keep, x, x.new_zeros(()))
    return weight_grad(x, G, geometry)


def weight_grad(x: Tensor, G: Tensor, geometry: Geometry, like: Tensor | None = None) -> Tensor:
    """PyTorch's weight gradient: samples added up, in the operands' dtype. ``like`` gives shape
    only."""
    if like is None:
        like = x.new_empty(geometry.weight_shape(x, G))
    wanted = [False, True, False]  # of input, weight and bias
    settings = geometry.settings()
    _, result, _ = torch.ops.aten.convolution_backward(G, x, like, None, *settings, wanted)
    found: Tensor = result
    return found


# -- ways to form gradients ------------------------------------------------------------------------


def chunks(x: Tensor, G: Tensor, geometry: Geometry, most: int | None = None) -> list[slice]:
    """So many samples at a time as may be unfolded at once, and no more than ``most``."""
    elements = CHUNK_ELEMENTS_CPU if x.device.type == "cpu" else CHUNK_ELEMENTS
    per_sample = G.shape[2:].numel() * x.shape[1] * geometry.offsets
    step = max(1, elements // max(1, per_sample))
    step = step if most is None else min(step, most)
    return [slice(i, i + step) for i in range(0, len(G), step)]


def unfolded(x: Tensor, G: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The convolution as a linear map, each group a sample of its own: ``A_NTd`` and ``G_NTp``."""
    spatial = x.dim() - 2
    B, positions, groups = G.shape[0], G.shape[2:].numel(), geometry.groups
    d = x.shape[1] // groups * geometry.offsets
    if any(geometry.padding):
        x = F.pad(x, [pad for pad in reversed(geometry.padding) for _ in range(2)])
    patches = x
    for axis in range(spatial):
        span = (geometry.kernel[axis] - 1) * geometry.dilation[axis] + 1
        patches = patches.unfold(2 + axis, span, geometry.stride[axis])
    every = [slice(None)] * (2 + spatial) + [slice(None, None, n) for n in geometry.dilation]
    patches = patches[tuple(every)]  # [B, C, *out, *kernel]
    # Copied along the positions, which lie together in x: several times as fast on a CPU.
    out, kernel = range(2, 2 + spatial), range(2 + spatial, 2 + 2 * spatial)
    A_Ndt = patches.permute(0, 1, *kernel, *out).reshape(B * groups, d, positions)
    return A_Ndt.mT, G.reshape(B * groups, G.shape[1] // groups, positions).mT


def by_groups(x: Tensor, G: Tensor, geometry: Geometry) -> Tensor:
    """A few samples as one with so many times the channels and groups: nothing is unfolded."""
    shape = geometry.weight_shape(x, G)
    grads = G.new_empty((len(G), *shape))
    copied = x[:1].numel() + G[:1].numel() + grads[:1].numel()
    step = max(1, COPIED_ELEMENTS // max(1, copied))
    parts = zip(x.split(step), G.split(step), grads.split(step), strict=True)
    for some_x, some_G, out in parts:
        as_one = geometry._replace(groups=len(out) * geometry.groups)
        one_x, one_G = (part.reshape(1, -1, *part.shape[2:]) for part in (some_x, some_G))
        place = out.flatten(0, 1)  # gives the weight's shape as well
        place.copy_(weight_grad(one_x, one_G, as_one, place))
    return grads


def by_patches(x: Tensor, G: Tensor, geometry: Geometry) -> Tensor:
    """Unfolded windows, multiplied."""
    grads = G.new_empty((len(G), *geometry.weight_shape(x, G)))
    grads_Npd = grads.view(len(G) * geometry.groups, G.shape[1] // geometry.groups, -1)
    for rows in chunks(x, G, geometry):
        A_NTd, G_NTp = unfolded(x[rows], G[rows], geometry)
        chunk = slice(rows.start * geometry.groups, rows.stop * geometry.groups)
        torch.bmm(G_NTp.mT, A_NTd, out=grads_Npd[chunk])
    return grads
