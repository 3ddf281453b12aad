"""The machine and the installation, for a bug report."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flash_clipping.ops.runtime import backend as backends

_PACKAGES = ("flash-clipping", "torch", "opacus", "triton", "numpy", "transformers")
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
    devices = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": device.name,
                "capability": f"{device.major}.{device.minor}",
                "memory_gib": round(device.total_memory / 2**30, 1),
            }
        )
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES},
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
            "float32_matmul_precision": _matmul_precision(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "default_dtype": str(torch.get_default_dtype()),
        },
        "variables": {name: os.environ[name] for name in _VARIABLES.split() if name in os.environ},
    }


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set by PyTorch's newer settings, in which the older has no word for it
        found = zip(("cuda", "cpu"), backends.matmul_settings(), strict=True)
        return ", ".join(f"{device} {setting.fp32_precision}" for device, setting in found)


def _version(package: str) -> str | None:
    with suppress(Exception):  # a broken installation raises more than ImportError
        return str(importlib.import_module(package.replace("-", "_")).__version__)
    try:
        return f"{importlib.metadata.version(package)} (cannot be imported)"
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Version of the kernel driver, where the system tells it without starting a process."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found.group() if found else None


def environment_text(report: Mapping[str, Any] | None = None) -> str:
    """:func:`environment` as text to paste."""
    lines = []
    for key, value in (environment() if report is None else report).items():
        if not isinstance(value, Mapping):
            lines.append(f"{key}: {value}")
            continue
        lines.append(f"{key}:" if value else f"{key}: none set")
        for name, entry in value.items():
            if isinstance(entry, list):
                entry = "; ".join(", ".join(map(str, item.values())) for item in entry) or "none"
            lines.append(f"  {name}: {entry}")
    return "\n".join(lines)
