"""The machine and the installation, for a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flash_clipping.ops.runtime import backend as backends

_PACKAGES = """flash-clipping torch opacus triton numpy scipy cryptography dp-accounting
transformers accelerate peft trl lightning diffusers bitsandbytes torchao"""
_VARIABLES = """FLASH_CLIPPING_BACKEND TRITON_INTERPRET TRITON_DISABLE_LINE_INFO TRITON_F32_DEFAULT
CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF
PYTORCH_NVML_BASED_CUDA_CHECK CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE
TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCHDYNAMO_DISABLE NCCL_NVLS_ENABLE OMP_NUM_THREADS
MKL_NUM_THREADS"""


def environment() -> dict[str, Any]:
    """Describe the machine and the installation, for a bug report.

    No path, host name or user name is read; environment variables are those that change results
    or speed here.
    """
    reason = backends._import_error()
    available = backends.is_triton_available()
    if not available and reason is None:
        reason = "no CUDA device, and TRITON_INTERPRET is not 1"
    on_cuda, on_cpu = backends.matmul_settings()
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    devices = [
        {
            "name": device.name,
            "capability": f"{device.major}.{device.minor}",
            "memory_gib": round(device.total_memory / 2**30, 1),
        }
        for device in found
    ]
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES.split()},
        },
        "platform": platform.platform(),
        "cpu": {"cores": os.cpu_count(), "torch_threads": torch.get_num_threads()},
        "cuda": {
            "available": torch.cuda.is_available(),
            "runtime": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
            "devices": devices,
        },
        "triton": {
            "available": available,
            "interpreting": backends.is_interpreting(),
            "why_not": None if available else reason,
        },
        "settings": {
            "fp32_matmuls": {"cuda": on_cuda.fp32_precision, "cpu": on_cpu.fp32_precision},
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "default_dtype": str(torch.get_default_dtype()),
        },
        "variables": {name: os.environ[name] for name in _VARIABLES.split() if name in os.environ},
    }


def _version(package: str) -> str | None:
    loaded = sys.modules.get(package.replace("-", "_"))  # of a clone there is no metadata
    with suppress(importlib.metadata.PackageNotFoundError):
        return str(getattr(loaded, "__version__", None) or importlib.metadata.version(package))
    return None


def _driver() -> str | None:
    """Version of the kernel driver, where the system tells it without starting a process."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found.group() if found else None
