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

import functools
import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Machine:
    """Rates of one kind of hardware, relative to its own weight-gradient matmul.

    Attributes:
        flop_per_byte: matmul rate over copy bandwidth (bytes read plus bytes written).
        gram_overhead: features that take as long as a Gram tile does besides its features.
        outer_overhead: positions that take as long as an outer tile does besides its positions.
        store_overhead: the same where the tile is kept.
        tile: side of a Gram tile: rows are padded to it, and the diagonal tiles are half waste.
    """

    flop_per_byte: float
    gram_rate: float
    outer_rate: float
    gram_overhead: int = 0
    outer_overhead: int = 0
    store_overhead: int = 0
    tile: int = 128


# One H200, bf16 (python -m benchmarks kernels): weight gradients at 800 TFLOP/s, copies at
# 4.2 TB/s, outer at 0.88, 0.92, 0.98 and 1.0 of the matmul for T of 512, 1024, 2048 and 16384;
# with the store (on an H100) at 0.64, 0.77, 0.93 and 0.95 for 256 to 2048. Gram tiles at 0.93 of it
# where they have 4096 features and 1.02 where they have 7680. Less on GPUs without the warps that
# load (gram/hopper.py, outer/hopper.py), for which there are no numbers here.
GPU_HALF = Machine(190.0, 1.0, 1.0, gram_overhead=200, outer_overhead=80, store_overhead=120)
# fp32 runs as three TF32 products, PyTorch's own matmul in IEEE fp32 at 52 TFLOP/s; outer operands
# must be transposed on the way, which TF32 does not do for free.
GPU_SINGLE = Machine(12.0, 1.3, 0.7, gram_overhead=100, outer_overhead=30, store_overhead=30)
# Kernels for segments mask their loads at the end of every segment.
SEGMENTS_SINGLE = replace(GPU_SINGLE, gram_rate=1.0, outer_rate=1.0)
# Two desktop-class cores: some 100 GFLOP/s in fp32 over 10 GB/s. Gram matrices are in float64.
CPU = Machine(10.0, 0.35, 0.8, tile=1)

CONVOLUTION_FLOP_PER_BYTE = {True: 60.0, False: 8.0}
"""Rate of convolutions' kernels over copy bandwidth: of 16-bit operands (True) and wider. These
gather their operands, and are further from what tensor cores can do."""

# Stored gradients replace the operands A and G, which are freed as soon as the norms are known, so
# up to about their size nothing is added to the peak.
STORE_BUDGET = 1.5


def machine_for(device_type: str, itemsize: int) -> Machine:
    """The constants for operands of ``itemsize`` bytes on a device."""
    if device_type == "cpu":
        return CPU
    return GPU_HALF if itemsize <= 2 else GPU_SINGLE


def may_hold_gradients(T: int, d: int, p: int, shared: int = 1) -> bool:
    """Whether ``[p, d]`` per sample takes no more memory than the ``A`` and ``G`` it replaces."""
    return d * p <= STORE_BUDGET * T * (d / shared + p)


def costs(
    *, B: int, T: int, d: int, p: int, itemsize: int, shared: int = 1, machine: Machine
) -> dict[str, float]:
    """Cost of norms *and* clipped sum, in matmul FLOP, by each algorithm."""
    matmul = 2.0 * B * T * d * p
    tiles = math.ceil(T / machine.tile)
    area = tiles * (tiles + 1) // 2 * machine.tile**2 if machine.tile > 1 else T * T
    features = d / shared + p + machine.gram_overhead * (1 + 1 / shared)
    # Without stored gradients one operand is scaled, which reads and writes it once.
    scaled_bytes = 2.0 * B * T * (d / shared if shared > 1 else min(d, p)) * itemsize
    clipped_sum = matmul + scaled_bytes * machine.flop_per_byte
    outer = matmul / machine.outer_rate
    per_tile = 1 / max(1, T)  # what a tile costs besides its positions weighs less when it has many
    stored = outer * (1 + machine.store_overhead * per_tile)
    copied = float(B * d * p * itemsize) * machine.flop_per_byte
    return {
        "gram": 2.0 * B * area * features / machine.gram_rate + clipped_sum,
        "outer": outer * (1 + machine.outer_overhead * per_tile) + clipped_sum,
        # The kernel cannot write faster than memory takes it; the clipped sum reads it once.
        "outer_store": max(stored, copied) + copied,
    }


@functools.lru_cache(maxsize=4096)
def choose_on(
    device_type: str,
    B: int,
    T: int,
    d: int,
    p: int,
    itemsize: int,
    *,
    may_store: bool,
    shared: int = 1,
) -> str:
    """``"rank_one"``, ``"gram"``, ``"outer"`` or ``"outer_store"``, whichever is cheapest.

    Args:
        may_store: the caller can keep per-sample gradients until the coefficients are known.
        shared: how many layers read the same input, so that each bears its part of ``A Aᵀ``.
    """
    if T == 1:
        return "rank_one"
    machine = machine_for(device_type, itemsize)
    candidates = costs(B=B, T=T, d=d, p=p, itemsize=itemsize, shared=shared, machine=machine)
    if not may_store or not may_hold_gradients(T, d, p, shared):
        del candidates["outer_store"]
    return min(candidates, key=candidates.__getitem__)


@functools.lru_cache(maxsize=1024)
def choose_for_convolution(device_type: str, B: int, T: int, d: int, p: int, itemsize: int) -> str:
    """``"outer"``, ``"outer_store"`` or, on a CPU, ``"gram"``: of a convolution whose gradients may
    be kept. ``B`` counts samples and groups, ``d`` what an output channel sees."""
    if device_type == "cpu":
        return choose_on("cpu", B, T, d, p, itemsize, may_store=True)
    # Tiles of 128 output channels (config_for of the kernel) take half as long again where they are
    # kept, those of 64 a tenth: by measurement, norms and then sums are faster for the former.
    if itemsize <= 2 and p % 128 == 0 and T <= 2048:
        return "outer"
    machine = replace(
        machine_for(device_type, itemsize),
        flop_per_byte=CONVOLUTION_FLOP_PER_BYTE[itemsize <= 2],
        outer_rate=1.0,
    )
    candidates = costs(B=B, T=T, d=d, p=p, itemsize=itemsize, machine=machine)
    return min("outer", "outer_store", key=candidates.__getitem__)


@functools.lru_cache(maxsize=1024)
def longest_for_gram(d: int, p: int, itemsize: int) -> int:
    """Up to how many rows a segment's norm costs less by its Gram matrix than by its product.

    For kernels on a GPU (:mod:`flash_clipping.ops.segments`), which decide on the device, segment
    by segment: ``L² (d + p)`` against ``2 L d p`` for L rows, both in whole tiles.
    """
    machine = GPU_HALF if itemsize <= 2 else SEGMENTS_SINGLE
    tile = machine.tile

    padded = math.ceil(d / tile) * math.ceil(p / tile) * tile**2

    def is_gram(blocks: int) -> bool:
        entries = blocks * (blocks + 1) // 2 * tile**2
        gram = entries * (d + p + machine.gram_overhead) / machine.gram_rate
        return gram <= padded * (blocks * tile + machine.outer_overhead) / machine.outer_rate

    blocks = 1
    while is_gram(blocks + 1):
        blocks += 1
    return blocks * tile
