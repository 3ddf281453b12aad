"""What a result depends on besides the code: recorded with every one."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

import flash_clipping

_REPOSITORY = Path(__file__).resolve().parent.parent


def describe(device: torch.device, revision: str | None = None) -> dict[str, str | None]:
    """Device, driver, library versions, git revision and date.

    ``revision`` says what is measured where the sources travel without their git directory.
    """
    return {
        "device": _device_name(device),
        "driver": _driver(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "opacus": _version("opacus"),
        "flash_clipping": flash_clipping.__version__,
        "revision": revision or _revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{model}, {torch.get_num_threads()} of {os.cpu_count()} cores"


def _driver(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _revision() -> str | None:
    """Short hash of HEAD, marked when the measured sources differ from it."""
    git = ("git", "-C", str(_REPOSITORY))
    head = _output(*git, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    changed = _output(*git, "status", "--porcelain", "--", "flash_clipping", "benchmarks/*.py")
    return f"{head} with changes" if changed else head


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else None
