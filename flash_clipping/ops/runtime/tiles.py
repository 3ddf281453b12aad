"""Shared by kernels: facts about the device, launches and what they cost the host, and tile loads.

B samples, T positions, F features.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import re
from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping._compat import compiled_kernel, early_start, has_gluon_modules
from flash_clipping.ops.runtime import backend

#: What a kernel that starts early calls; both ``None`` where none can.
gdc_launch_dependents, gdc_wait = early_start()

TL_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

SHORT_TILE, LONG_TILE = (192, 128), (128, 256)
"""Rows and columns of tiles of sums by :mod:`flash_clipping.ops.runtime.ring`, which needs Gluon:
the first for samples of few positions."""


def cdiv(numerator: int, denominator: int) -> int:
    """Rounded up. Triton's own works in kernels too, which costs the host microseconds."""
    return -(-numerator // denominator)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is not below ``n``; see :func:`cdiv`."""
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def sm_count(device: torch.device) -> int:
    """How many programs a persistent grid has on a tensor's device: one for each multiprocessor."""
    if device.type != "cuda":
        return 4  # a small grid, so that the interpreter tests its loop
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def generation(device: torch.device) -> int:
    """Major compute capability of a GPU by NVIDIA (8: Ampere and Ada, 9: Hopper); 0 of all else."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_capability(device)[0]


def has_tma(device: torch.device) -> bool:
    """Whether descriptors can fetch tiles (Hopper and later; the interpreter plays it)."""
    return device.type != "cuda" or generation(device) >= 9


def is_hopper(device: torch.device) -> bool:
    """Whether warps multiply in groups of four, asynchronously, from shared memory."""
    return generation(device) == 9


def starts_early(device: torch.device) -> bool:
    """Whether a kernel can start before the one it waits for has ended (PDL)."""
    return generation(device) >= 9 and gdc_wait is not None


def fits_tma(*tensors: Tensor) -> bool:
    """Whether a descriptor can address these: 16-byte aligned, rows contiguous."""
    return all(
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(s > 0 and s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
        for x in tensors
    )


def dot_precision(dtype: torch.dtype) -> str:
    """How ``tl.dot`` multiplies: fp32 as three TF32 products, never as one (1e-3 error)."""
    if dtype != torch.float32:
        return "tf32"  # says nothing about bf16 and fp16, whose products are exact
    return "ieee" if torch.version.hip is not None else "tf32x3"


def with_unit_stride(x: Tensor) -> Tensor:
    """``x`` with features next to each other; a copy where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def in_eights(*sizes: int) -> bool:
    """Whether all of these are multiples of 8: of 16 bytes, in every dtype that kernels read."""
    return not any([size % 8 for size in sizes])


# -- launches --------------------------------------------------------------------------------------
#
# Triton looks at each argument of each launch to find the kernel that was compiled for arguments of
# its kind. That is half of what a launch takes, and small models wait for the host; so kernels that
# were found are remembered here by what decides which one it is.

#: Kernels found last: shapes are part of what they are found by, so they could become many.
_MOST = 4096

VERSION = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))
"""Of Triton: its first two numbers."""

LAST_WITH_GLUON = (3, 9)
"""Version of Triton up to which kernels in Gluon were seen to compile (on a GPU they ran with 3.6):
Gluon is experimental, and changes."""


def has_gluon() -> bool:
    """Whether this Triton is one that kernels in Gluon compile with."""
    return VERSION <= LAST_WITH_GLUON and has_gluon_modules()


_CompiledKernel = compiled_kernel()
_remembers = torch.version.hip is None and _CompiledKernel is not None
_found: dict[Hashable, tuple[Any, Any, tuple[Any, ...]]] = {}


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit`` for a kernel that is compiled once for all numbers.

    Triton compiles again where an integer is 1, or becomes a multiple of 16: many kernels for one
    model. This one knows nothing of integers but by constants of its own, and of addresses
    (``..._ptr``) whether they are multiples of 16.
    """
    numbers = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if "constexpr" not in str(parameter.annotation) and not name.endswith("_ptr")
    ]
    return triton.jit(function, do_not_specialize=numbers)


def launch(
    kernel: Any, programs: int, *args: Any, workspace: bool = False, **constants: Any
) -> None:
    """``kernel[(programs,)](*args, **constants)``.

    Args:
        kernel: a function of ``triton.jit`` whose constants come after all other parameters.
        programs: size of the grid.
        args: tensors, the first of them on the device that launches; None; and integers (no
            bools or floats, which equal some), which must come again from step to step, or what
            is remembered would never be found.
        workspace: whether the kernel makes descriptors on the device, which takes memory there.
        constants: all constants of the kernel, and Triton's own options.
    """
    if backend.only_compiles():
        backend.hand_over(lambda: kernel.warmup(*args, grid=(programs,), **constants))
        return
    if workspace:
        # Descriptors made by the host would cost it 10 µs each. Triton asks an allocator of the
        # current context for the memory; ours, in a copy of the context, leaves the caller's alone.
        context = contextvars.copy_context()
        context.run(triton.set_allocator, _allocator(args[0].device))
        context.run(launch, kernel, programs, *args, **constants)
        return
    key: list[Hashable] = [id(kernel)]
    plain: list[Any] = []
    for value in args:
        if isinstance(value, Tensor):
            address = value.data_ptr()
            # Loads of 16 bytes are compiled in where the address allows them.
            key += (value.dtype, value.get_device(), address % 16)
            plain.append(address)
        else:
            key.append(value)
            plain.append(value)
    key += constants
    key += constants.values()
    number = tuple(key)
    found = _found.get(number)
    if found is not None:
        _, compiled, in_order = found
        # Addresses: of tensors Triton would ask for them, and ask the driver whether the device
        # can read them, which it said of tensors on this device when the kernel was found.
        compiled[programs, 1, 1](*plain, *in_order)
        return
    in_order = tuple([constants[name] for name in kernel.arg_names[len(args) :]])
    compiled = kernel[(programs,)](*args, **constants)
    if not _remembers or not isinstance(compiled, _CompiledKernel):  # interpreted
        return
    if len(_found) >= _MOST:
        _found.clear()
    # The kernel is held as well: its id, by which it goes, stays its own.
    _found[number] = kernel, compiled, in_order


@functools.cache
def _allocator(device: torch.device) -> Callable[[int, int, int | None], Tensor]:
    return lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device)


# -- in kernels ------------------------------------------------------------------------------------


@triton.jit
def multiple_of(n, EACH: tl.constexpr):
    """``n``, of which the compiler is to know that it is a multiple of ``EACH``."""
    return n // EACH * EACH


@triton.jit
def row_of(table_ptr, rows, program, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """The row of a table (:mod:`flash_clipping.ops.runtime.tables`) that a program is for; the last
    column holds each row's first program. ``ROWS``: a power of 2 not below ``rows``."""
    index = tl.arange(0, ROWS)
    firsts = tl.load(table_ptr + (index + 1) * COLUMNS - 1, mask=index < rows, other=1 << 40)
    return tl.sum(tl.where(firsts <= program, 1, 0), 0) - 1


@triton.jit
def tile_in_groups(tile, tiles_p, tiles_d, GROUP: tl.constexpr):
    """Row and column of a tile. ``GROUP`` rows of tiles are walked together: programs at work at
    one time share what they read."""
    first = (tile // (GROUP * tiles_d)) * GROUP
    height = min(tiles_p - first, GROUP)
    within = tile % (GROUP * tiles_d)
    return first + within % height, within // height


@triton.jit
def operand(row, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):
    """Address, strides of samples and positions, and width, from four columns of a table's row.

    To move 16 bytes at a time the compiler must know that address and strides are multiples of that
    (``ALIGNED``), and the width (``WHOLE``). It rounds masks to what it was told of the width, so
    that must be true of every row.
    """
    X_ptr = tl.load(row).to(tl.pointer_type(DTYPE))
    stride_b = tl.load(row + 1)
    stride_t = tl.load(row + 2)
    width = tl.load(row + 3).to(tl.int32)
    EACH: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    if ALIGNED:
        X_ptr = tl.multiple_of(X_ptr, 16)
        stride_b = tl.multiple_of(stride_b, EACH)
        stride_t = tl.multiple_of(stride_t, EACH)
    if WHOLE:
        width = tl.multiple_of(width, EACH)
    return X_ptr, stride_b, stride_t, width


@triton.jit
def load_tile(
    source, b, t, f, T, F, stride_b, stride_t,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows ``t..`` and columns ``f..`` of sample ``b``; zero outside ``[T, F]``."""
    if TMA:
        return source.load([b, t, f]).reshape(ROWS, COLUMNS)
    else:
        row = t + tl.arange(0, ROWS)
        column = f + tl.arange(0, COLUMNS)
        # A sample may hold more than 2**31 elements (a vocabulary's gradient at long T).
        start = source + b.to(tl.int64) * stride_b
        return load_rows(start, row.to(tl.int64), stride_t, column, row < T, column < F)


@triton.jit
def load_rows(X_ptr, row, stride, column, in_rows, in_columns):
    """``[rows, columns]`` of a matrix whose rows are ``stride`` apart; zero outside."""
    at = X_ptr + row[:, None] * stride + column[None, :]
    return tl.load(at, mask=in_rows[:, None] & in_columns[None, :], other=0.0)


@triton.jit
def store_rows(X_ptr, row, stride, column, x, in_rows, in_columns):
    """Store ``[rows, columns]`` in the matrix's dtype; nothing outside."""
    at = X_ptr + row[:, None] * stride + column[None, :]
    inside = in_rows[:, None] & in_columns[None, :]
    tl.store(at, x.to(X_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sum_by_warp(tile, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """The sum of a matrix product's tile in ``WARPS`` parts: no warp waits for another."""
    return tl.sum(tl.reshape(tl.sum(tile, 1), (WARPS, ROWS // WARPS)), 1)
