"""Which algorithm computes the per-sample norms of a linear layer fastest: a pure function.

B samples, T positions, d input features, p output features. Time is counted in units of FLOP of
the weight-gradient matmul, which is what each algorithm is compared with:

* ``rank_one``: T = 1, so the gradient is one outer product and its norm a product of row norms.
* ``gram``: tiles of ``A Aᵀ`` and ``G Gᵀ``; only tiles on and below the diagonal.
* ``outer``: tiles of ``Gᵀ A``, squared and summed.
* ``outer_store``: the same, keeping the tiles; the clipped sum then reads them once and the
  weight-gradient matmul is saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """What one kind of hardware is good at, relative to its own weight-gradient matmul."""

    flop_per_byte: float
    """Weight-gradient matmul rate over copy bandwidth."""
    gram_rate: float
    outer_rate: float
    outer_store_rate: float
    tile: int
    """Side of a Gram tile: rows are padded to it, and the diagonal tiles are half waste."""


# One H200, bf16: cuBLAS weight gradients 600 to 840 TFLOP/s, copies 4.3 TB/s (design, section 6).
GPU_HALF = Machine(
    flop_per_byte=170.0, gram_rate=0.75, outer_rate=0.95, outer_store_rate=0.80, tile=128
)
# fp32 operands run as three TF32 products: a third of half the rate, the same bandwidth.
GPU_SINGLE = Machine(
    flop_per_byte=30.0, gram_rate=0.75, outer_rate=0.95, outer_store_rate=0.90, tile=128
)
# Two desktop-class cores: some 100 GFLOP/s in fp32 over 10 GB/s.
CPU = Machine(flop_per_byte=10.0, gram_rate=0.8, outer_rate=0.8, outer_store_rate=0.8, tile=1)

# Stored gradients replace the operands A and G, which are freed as soon as the norms are known, so
# up to about their size nothing is added to the peak.
STORE_BUDGET = 1.5


def machine_for(device_type: str, itemsize: int) -> Machine:
    """The constants for operands of ``itemsize`` bytes on a device."""
    if device_type == "cpu":
        return CPU
    return GPU_HALF if itemsize <= 2 else GPU_SINGLE


def may_hold_gradients(*, T: int, d: int, p: int, shared: int = 1) -> bool:
    """Whether ``[p, d]`` per sample takes no more memory than the ``A`` and ``G`` it replaces."""
    return d * p <= STORE_BUDGET * T * (d / shared + p)


def costs(
    *, B: int, T: int, d: int, p: int, itemsize: int, shared: int = 1, machine: Machine
) -> dict[str, float]:
    """Cost of norms *and* clipped sum, in matmul FLOP, by each algorithm."""
    matmul = 2.0 * B * T * d * p
    tiles = math.ceil(T / machine.tile)
    area = tiles * (tiles + 1) // 2 * machine.tile**2 if machine.tile > 1 else T * T
    gram = 2.0 * B * area * (d / shared + p)
    stored_bytes = float(B * d * p * itemsize)
    return {
        "gram": gram / machine.gram_rate + matmul,
        "outer": matmul / machine.outer_rate + matmul,
        # The rate of the storing kernel holds for large T; it cannot write faster than memory.
        "outer_store": max(
            matmul / machine.outer_store_rate, stored_bytes * machine.flop_per_byte / 2
        )
        + stored_bytes * machine.flop_per_byte / 2,
    }


def choose(
    *,
    B: int,
    T: int,
    d: int,
    p: int,
    itemsize: int,
    may_store: bool,
    shared: int = 1,
    machine: Machine | None = None,
) -> str:
    """``"rank_one"``, ``"gram"``, ``"outer"`` or ``"outer_store"``, whichever is cheapest.

    Args:
        may_store: the caller can keep per-sample gradients until the coefficients are known.
        shared: how many layers read the same input, so that each bears its part of ``A Aᵀ``.
        machine: constants; those of an H200 for this ``itemsize`` when left out.
    """
    if T == 1:
        return "rank_one"
    machine = machine or machine_for("cuda", itemsize)
    candidates = costs(B=B, T=T, d=d, p=p, itemsize=itemsize, shared=shared, machine=machine)
    if not may_store or not may_hold_gradients(T=T, d=d, p=p, shared=shared):
        del candidates["outer_store"]
    return min(candidates, key=candidates.__getitem__)
