"""Starting kernels: what every launch costs the host.

Triton looks at each argument of each launch to find the kernel that was compiled for arguments of
its kind. That is half of what a launch takes, and small models wait for the host; so kernels that
were found are remembered here by what decides which one it is.
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
from torch import Tensor

from flash_clipping._compat import compiled_kernel, has_gluon_modules
from flash_clipping.ops.runtime import backend

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
