"""What a result depends on besides the code: recorded with every one."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch

from flash_clipping.diagnostics.environment import environment

_REPOSITORY = Path(__file__).resolve().parent.parent


def describe(device: torch.device, revision: str | None = None) -> dict[str, str | None]:
    """Device, driver (of a GPU), library versions, git revision and date.

    ``revision`` says what is measured where the sources travel without their git directory.
    """
    found = environment()
    versions = found["versions"]
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "driver": (found["cuda"]["driver"] or "unknown") if on_gpu else None,
        **{name: versions[name] for name in ("python", "torch", "triton", "opacus")},
        "flash_clipping": versions["flash-clipping"],
        "revision": revision or _revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    model = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"{model}, {torch.get_num_threads()} of {os.cpu_count()} cores"


def _revision() -> str | None:
    """Short hash of HEAD, marked when the measured sources differ from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    changed = _git("status", "--porcelain", "--", "flash_clipping", "benchmarks/*.py")
    return f"{head} with changes" if changed else head


def _git(*command: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", _REPOSITORY, *command], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
