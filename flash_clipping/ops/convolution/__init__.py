"""Convolutions: norms of per-sample weight gradients, these gradients, and their clipped sum.

B samples, O output channels, C input channels of one group.

``tf32=True``: fp32 operands are cut to TF32 (10 of 23 bits of the mantissa), so that tensor cores
need one product where fp32 takes three. Each number loses less than 2⁻¹⁰ of itself. Norms, kept
gradients and sums are of the same cut operands: what is measured is what is released, as for 16-bit
operands.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flash_clipping.errors import InvalidValue
from flash_clipping.ops.convolution import reference
from flash_clipping.ops.convolution.geometry import Geometry as Geometry
from flash_clipping.ops.runtime import backend as backends
from flash_clipping.ops.runtime.shapes import check_coefficients, in_one_dtype


def laid_out(
    x: Tensor, G: Tensor, geometry: Geometry, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The operands in the memory format in which the other functions here read them: copies where
    they are in another. For a caller who will ask twice, and can let go of what it had."""
    x, G = _checked(x, G, geometry)
    return backends.run(reference.laid_out, backend, G, x, G, geometry)


def convolution_sqnorms(
    x: Tensor, G: Tensor, geometry: Geometry, *, tf32: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Squared norms of the per-sample gradients of a convolution's weight, on a GPU by one launch,
    which writes nothing of the size of its operands.

    Args:
        x: the layer's input, ``[B, groups·C, *in]``, in any memory format.
        G: its output gradient, ``[B, O, *out]``.
        tf32: see above.

    Returns:
        Squared norms in parts ``[B, n]`` that are still to be added up, and what rounding may hide
        of them, ``[B]`` (:mod:`flash_clipping.ops.error_bounds`); both in fp32 (float64 for
        float64). None where :func:`convolution_sum` releases the very numbers that were measured.

    Raises:
        ValueError: shapes that do not fit.
    """
    x, G = _checked(x, G, geometry)
    return backends.run(reference.convolution_sqnorms, backend, G, x, G, geometry, tf32)


def convolution_grads(
    x: Tensor, G: Tensor, geometry: Geometry, *, tf32: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """The per-sample gradients themselves, ``[B, O, C, *kernel]`` in G's dtype or wider, in any
    order in memory, and their squared norms in parts ``[B, n]``, or None where they are still to be
    taken. What is squared is the rounded value that is kept: what is measured is released.
    """
    x, G = _checked(x, G, geometry)
    return backends.run(reference.convolution_grads, backend, G, x, G, geometry, tf32)


def convolution_sum(
    x: Tensor,
    G: Tensor,
    coef_B: Tensor,
    geometry: Geometry,
    *,
    tf32: bool = False,
    backend: str = "auto",
) -> Tensor:
    """``Σ_b coef_b · g_b``, ``[O, C, *kernel]`` in fp32 (float64 for float64).

    A coefficient of 0 excludes its sample, whatever its operands hold: inf and NaN too.
    """
    x, G = _checked(x, G, geometry)
    check_coefficients(coef_B, G, "G")
    return backends.run(reference.convolution_sum, backend, G, x, G, coef_B, geometry, tf32)


def _checked(x: Tensor, G: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Operands of one dtype that fit together: a kernel reads where these shapes say."""
    _check_shapes(x.shape, G.shape, geometry)
    if x.get_device() != G.get_device():
        raise InvalidValue(f"FC303 x is on {x.device} and G is on {G.device}.")
    return in_one_dtype(x, G)


@functools.lru_cache(maxsize=1024)
def _check_shapes(x: torch.Size, G: torch.Size, geometry: Geometry) -> None:
    out_sizes, groups = geometry.out_sizes(x), geometry.groups
    if (*x[:1], *G[1:2], *out_sizes) != G or x[1] % groups:
        raise InvalidValue(
            f"FC303 G has shape {tuple(G)} and x has shape {tuple(x)}; expected "
            f"[B, O, {', '.join(map(str, out_sizes))}] for this convolution: {geometry}."
        )
    if G[1] % groups:
        raise InvalidValue(f"FC302 G has {G[1]} channels; expected a multiple of {groups} groups.")
