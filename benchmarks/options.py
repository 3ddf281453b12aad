"""The options that several subcommands share, and the settings they make."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from benchmarks import models
from benchmarks.methods import METHODS, Setting

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

DEFAULT_METHODS = (
    "nonprivate",
    "flash",
    "flash-two-pass",
    "opacus-ghost",
    "opacus-hooks",
    "fastdp",
)


class UsageError(Exception):
    """The command line asks for something that cannot be done; the message says what to change."""


def add_setting_options(parser: argparse.ArgumentParser) -> None:
    """Everything that :func:`setting` reads."""
    parser.add_argument(
        "--model",
        nargs="+",
        default=["decoder-small"],
        metavar="NAME",
        help=f"of {', '.join(models.NAMES)}; your own: flash-clipping bench",
    )
    parser.add_argument(
        "--methods",
        default=",".join(DEFAULT_METHODS),
        help=f"comma-separated, of {', '.join(METHODS)} (default: %(default)s)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads for operators")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on CUDA, fp32 on a CPU")
    parser.add_argument("--layers", type=int, help="override the model's number of layers")
    parser.add_argument("--lora", type=int, metavar="R", help="freeze it; rank R on every linear")
    parser.add_argument("--checkpointing", action="store_true", help="recompute each block")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="module.compile(), every method alike",
    )
    parser.add_argument(
        "--autocast", action="store_true", help="fp32 weights, forward under autocast to --dtype"
    )
    parser.add_argument("--optimizer", action="store_true", help="with noise and AdamW")
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--noise-multiplier", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    add_output_options(parser)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument("--revision", help="git revision to record where there is no git directory")


def check_device(name: str) -> None:
    """Refuse a GPU that is not there, before anything else is missed because of it."""
    found = torch.cuda.device_count()
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= found:
        known = f"{found} of them" if found else "no CUDA device"
        raise UsageError(f"--device {name}: found {known}. Expected for example --device cpu")


def method_names(given: str) -> list[str]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    if unknown := [name for name in names if name not in METHODS]:
        raise UsageError(f"unknown methods {unknown}: choose from {', '.join(METHODS)}")
    return list(dict.fromkeys(names))


def dtype_name(options: argparse.Namespace) -> str:
    return options.dtype or ("fp32" if torch.device(options.device).type == "cpu" else "bf16")


def setting(options: argparse.Namespace, model: str, **shape: int | None) -> Setting:
    """What one comparison needs to know, from the command line.

    Sets the process's number of threads and its CUDA device, where they are given.

    Args:
        shape: ``batch`` and ``seq``, where they are not the model's.
    """
    device = torch.device(options.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # events and Triton kernels go to the current device
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        workload = models.workload(
            model,
            **shape,
            layers=options.layers,
            checkpointing=options.checkpointing,
            lora=options.lora,
        )
    except (ValueError, ImportError, AttributeError) as error:
        raise UsageError(str(error)) from error
    return Setting(
        workload=workload,
        device=device,
        dtype=DTYPES[dtype_name(options)],
        optimizer=options.optimizer,
        compile=options.compile,
        autocast=options.autocast,
        max_grad_norm=options.max_grad_norm,
        noise_multiplier=options.noise_multiplier,
        seed=options.seed,
    )


def recorded(options: argparse.Namespace) -> dict[str, object]:
    """What decides what was measured, for the JSON file."""
    left_out = {"command", "run", "json", "revision"}
    settings = {key: value for key, value in vars(options).items() if key not in left_out}
    backend = os.environ.get("FLASH_CLIPPING_BACKEND", "auto")
    return settings | {"dtype": dtype_name(options), "backend": backend}
