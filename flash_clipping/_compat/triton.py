"""Triton, which is imported by those who ask."""

from __future__ import annotations

import importlib
from functools import cache
from types import SimpleNamespace
from typing import Any

from flash_clipping._compat.lookup import find, load


def compiled_kernel() -> Any:
    """Type of a compiled kernel, which is started by ``kernel[grid](*addresses)``. Without:
    ``None``, and Triton looks for the kernel at every launch."""
    found = find(load("triton.compiler"), "CompiledKernel")
    return found if hasattr(found, "__getitem__") else None


def early_start() -> tuple[Any, Any]:
    """Functions that let the next kernel begin, and wait for the one before. Without: ``None``, and
    kernels begin one after the other."""
    cuda = find(load("triton.language"), "extra.cuda")
    names = ("gdc_launch_dependents", "gdc_wait")
    launch, wait = (getattr(cuda, name, None) for name in names)
    return (launch, wait) if launch is not None and wait is not None else (None, None)


@cache
def gluon() -> SimpleNamespace | None:
    """What kernels in Gluon, Triton's lower language, are written with. Without: ``None``, and
    kernels in Triton run in their place."""
    try:
        language = importlib.import_module("triton.experimental.gluon.language")
        hopper = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
        tma = hopper.tma
        return SimpleNamespace(
            jit=importlib.import_module("triton.experimental.gluon").jit,
            language=language,
            fence_async_shared=hopper.fence_async_shared,
            mbarrier=hopper.mbarrier,
            tma=tma,
            load_async=getattr(tma, "async_load", None) or tma.async_copy_global_to_shared,  # 3.7
            warpgroup_mma=hopper.warpgroup_mma,
            warpgroup_mma_wait=hopper.warpgroup_mma_wait,
        )
    except (ImportError, AttributeError):
        return None
