"""``hostwork``: what a private step costs the host, without the kernels.

Small models wait for the host. On a CPU, every Triton launch is replaced by the look-up that finds
its kernel; the rest of a step is the host's work on the way that a GPU takes. Figures: processor
time of forward and backward beside the plain model's; that of the first step, which shows who is a
sample, over a later one's, both with PyTorch's kernels; and calls per trainable layer, by the part
of the library that makes them (as cProfile counts: Python functions and built-in ones, by their
callers; calls that ``ops/`` makes are not counted).

Results of such a step are wrong, as nothing is computed; its gradients are never used.

``--kernels`` counts the kernels that a first step asks Triton for on a Hopper GPU: what is compiled
on a machine that has compiled nothing. Nothing is compiled, and references do the work.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import importlib
import json
import os
import pkgutil
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import flash_clipping
from benchmarks import models
from benchmarks.environment import describe
from benchmarks.options import DTYPES, UsageError
from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proof.gate import Gate

#: Calls that these make are counted.
PARTS = ("capture", "rules", "factors", "finish", "engine")

LIBRARY = Path(flash_clipping.__file__).parent

Model = tuple[nn.Module, dict[str, Tensor]]


def _tokens(B: int = 4, T: int = 8) -> Tensor:
    return torch.randint(3, 64, (B, T))


def _bert() -> Model:
    import transformers as tr

    config = tr.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=12, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=16,
    )  # fmt: skip
    return tr.BertForSequenceClassification(config), {"input_ids": _tokens()}


def _smollm() -> Model:
    import transformers as tr

    config = tr.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=12, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=64, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return tr.LlamaForCausalLM(config), {"input_ids": _tokens()}


def _t5() -> Model:
    import transformers as tr

    config = tr.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=6, num_decoder_layers=6,
        num_heads=2, dropout_rate=0.0, use_cache=False,
    )  # fmt: skip
    model = tr.T5ForConditionalGeneration(config)
    return model, {"input_ids": _tokens(), "decoder_input_ids": _tokens()}


def _qwen3_moe() -> Model:
    import transformers as tr

    config = tr.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=32,
        num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return tr.Qwen3MoeForCausalLM(config), {"input_ids": _tokens()}


class _Block(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.n, self.m = nn.GroupNorm(4, c), nn.GroupNorm(4, c)
        self.a, self.b = (nn.Conv2d(c, c, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.relu(self.m(self.a(F.relu(self.n(x))))))


class _WideResNet(nn.Module):
    def __init__(self, c: int = 16, blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.blocks = nn.Sequential(*[_Block(c) for _ in range(blocks)])
        self.head = nn.Linear(c, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def _wrn() -> Model:
    return _WideResNet(), {"x": torch.randn(4, 3, 8, 8)}


class _Depth(nn.Module):
    """A dense prediction transformer: attention, then convolutions up to the image's size."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        import transformers as tr

        neck = [width // 4, width // 2, width, width]
        config = tr.DPTConfig(
            hidden_size=width, num_attention_heads=width // 64, intermediate_size=4 * width,
            image_size=size, num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=neck, fusion_hidden_size=width // 4, is_hybrid=False,
            backbone_config=None,
        )  # fmt: skip
        self.model = tr.DPTForDepthEstimation(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x).predicted_depth


def _dpt() -> Model:
    return _Depth(512, 112), {"x": torch.randn(2, 3, 112, 112)}


def _named(name: str) -> Model:
    """A model of :mod:`benchmarks.models` in its own widths, with two layers where it can say."""
    try:
        workload = models.workload(name, batch=4, layers=2)
    except (TypeError, ValueError):
        workload = models.workload(name, batch=4)
    inputs, _ = workload.draw(torch.Generator().manual_seed(0))
    return workload.build(), {"x": inputs}


#: Small models with as many layers as those that they are named after, or half of them.
MODELS: dict[str, Callable[[], Model]] = {
    "bert": _bert,
    "smollm": _smollm,
    "t5": _t5,
    "qwen3-moe": _qwen3_moe,
    "wrn": _wrn,
}

#: Models whose kernels are counted, beside those of :mod:`benchmarks.models`.
WIDE: dict[str, Callable[[], Model]] = {"dpt": _dpt}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "hostwork",
        help="count what a private step costs the host, with kernels left out",
        description="Processor time of a step beside the plain model's and calls per trainable "
        "layer, on a CPU with stubbed kernels.",
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=(*WIDE, *models.NAMES),
        metavar="MODEL",
        help="count the kernels of these models instead: "
        f"{', '.join(WIDE)}, or what `step --model` takes",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of --kernels")
    parser.add_argument("--steps", type=int, default=60, help="steps of each that are timed")
    parser.add_argument("--calls", type=int, default=0, metavar="N", help="list the N most called")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.set_defaults(run=run)


def _looked_up(
    kernel: Any, programs: int, *args: Any, workspace: bool = False, **constants: Any
) -> None:
    """What a launch does before the kernel starts (``ops/runtime/launches.py``)."""
    key: list[Any] = [id(kernel)]
    plain: list[Any] = []
    for value in args:
        if isinstance(value, Tensor):
            address = value.data_ptr()
            key += (value.dtype, value.get_device(), address % 16)
            plain.append(address)
        else:
            key.append(value)
            plain.append(value)
    key += constants
    key += constants.values()
    hash(tuple(key))


@contextlib.contextmanager
def no_kernels() -> Iterator[None]:
    """Let operations go the way of Triton, whose launches do nothing."""
    stack = contextlib.ExitStack()
    with stack:
        names = {"TRITON_INTERPRET": "1", "FLASH_CLIPPING_BACKEND": "triton"}
        stack.enter_context(mock.patch.dict(os.environ, names))
        from flash_clipping.ops.runtime.launches import launch

        # All first: a module that is imported later would take the stand-in for good.
        modules = [
            importlib.import_module(each.name)
            for name in ("flash_clipping.ops", "flash_clipping.layers.ops")
            for each in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}.")
        ]
        for module in modules:
            if vars(module).get("launch") is launch:
                stack.enter_context(mock.patch.object(module, "launch", _looked_up))
        yield


def _loss(output: Any) -> Tensor:
    tensor = output if isinstance(output, Tensor) else output.logits
    return tensor.flatten(1).square().mean(1).mean()


def _step(model: nn.Module, batch: dict[str, Tensor], params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = None
    if isinstance(model, GradSampleModuleFlashClipping):
        model.set_grad_sample_to_none()
    _loss(model(**batch)).backward()


def measure(name: str, steps: int) -> tuple[dict[str, Any], Counter[str]]:
    """Figures of one model, and the functions that its step calls most, per trainable layer."""
    torch.manual_seed(0)
    plain, batch = MODELS[name]()
    torch.manual_seed(0)
    wrapped = GradSampleModuleFlashClipping(MODELS[name]()[0])
    both = {"plain": plain, "private": wrapped}
    params = {key: list(model.parameters()) for key, model in both.items()}
    _step(plain, batch, params["plain"])
    with_kernels: list[float] = []  # of the first step, in which all is proven, and later ones
    for _ in range(6):
        start = time.process_time()
        _step(wrapped, batch, params["private"])
        with_kernels.append(time.process_time() - start)
    times: dict[str, list[float]] = {key: [] for key in both}
    with no_kernels():
        for number in range(steps + 4):
            for key, model in both.items():
                start = time.process_time()
                _step(model, batch, params[key])
                if number >= 4:  # plans are made
                    times[key].append(time.process_time() - start)
        profile = cProfile.Profile()
        for param in params["private"]:
            param.grad = None
        wrapped.set_grad_sample_to_none()
        profile.enable()
        _loss(wrapped(**batch)).backward()
        profile.disable()
    layers = sum(
        any(p.requires_grad for p in module.parameters(recurse=False)) for module in plain.modules()
    )
    by_part: Counter[str] = Counter()
    by_function: Counter[str] = Counter()
    for callee, (_, _, _, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        for caller, counts in callers.items():
            part = _part_of(caller[0])
            if part is not None:
                by_part[part] += counts[1]
                where = f"{Path(caller[0]).relative_to(LIBRARY)}: {caller[2]} -> {callee[2]}"
                by_function[where] += counts[1]
    medians = {key: 1e3 * statistics.median(found) for key, found in times.items()}
    row = {
        "model": name,
        "layers": layers,
        "plain_ms": medians["plain"],
        "private_ms": medians["private"],
        "ratio": medians["private"] / medians["plain"],
        "first_over_later": with_kernels[0] / statistics.median(with_kernels[2:]),
        "calls_per_layer": sum(by_part.values()) / layers,
        "calls_by_part": {part: count / layers for part, count in by_part.most_common()},
    }
    return row, Counter({where: round(count / layers, 1) for where, count in by_function.items()})  # type: ignore[misc]


class _Hopper:
    """What Triton asks its driver for a kernel to compile."""

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def asked_for() -> Iterator[set[tuple[str, str]]]:
    """The kernels that operations on a CPU ask Triton for inside, as those on a Hopper GPU would:
    names, and what else decides about the binary."""
    from triton import knobs
    from triton.runtime import driver

    from flash_clipping.ops.runtime import backend, cost, tiles

    found: set[tuple[str, str]] = set()

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found.add((fn.name.rpartition(".")[2], key))
        return True  # it is not to be compiled

    def resolved(wanted: str, tensor: Tensor) -> str:
        return "torch" if wanted == "torch" or tensor.dtype == torch.float64 else "triton"

    def on_gpu(choose: Callable[..., str]) -> Callable[..., str]:
        return lambda _, *args, **kwargs: choose("cuda", *args, **kwargs)

    facts: dict[str, Any] = {
        "sm_count": lambda _: 132,
        "generation": lambda _: 9,
        "is_hopper": lambda _: True,
        "starts_early": lambda _: True,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", _Hopper()))
        stack.enter_context(mock.patch.object(knobs.runtime, "jit_cache_hook", note))
        stack.enter_context(mock.patch.multiple(tiles, **facts))
        stack.enter_context(mock.patch.multiple(backend, compilation=found, resolve=resolved))
        for name in ("choose_on", "choose_for_convolution"):
            stack.enter_context(mock.patch.object(cost, name, on_gpu(getattr(cost, name))))
        yield found


_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution, _aten.convolution_backward
}  # fmt: skip


class _ProductsInFp32(TorchDispatchMode):
    """Products of half precision in fp32, which many a CPU computes fifty times faster."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = next((x.dtype for x in args if isinstance(x, Tensor)), torch.float32)
        if func.overloadpacket not in _PRODUCTS or dtype not in (torch.bfloat16, torch.float16):
            return func(*args, **(kwargs or {}))
        found = func.overloadpacket(*tree_map_only(Tensor, Tensor.float, args))
        if kwargs and "out" in kwargs:
            return kwargs["out"].copy_(found)
        return tree_map_only(Tensor, lambda x: x.to(dtype), found)


def kernels_of(name: str, dtype: torch.dtype) -> Counter[str]:
    """How many kernels of each name the first step of a model asks for, without the optimizer's.

    The comparison of single samples with autograd before it is left out: it takes most of the time,
    and its clipped sums ask for the kernels that the step asks for.

    Raises:
        UsageError: Triton's kernels are interpreted in this process.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET is 1: nothing is compiled. Unset it to count kernels.")
    torch.manual_seed(0)
    model, batch = WIDE[name]() if name in WIDE else _named(name)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in batch.values()]
    wrapped = GradSampleModuleFlashClipping(model.to(dtype))
    comparison = mock.patch.object(Gate, "examine", lambda *_: None)
    with asked_for() as found, _ProductsInFp32(), comparison:
        _loss(wrapped(*inputs)).backward()
    return Counter(kernel for kernel, _ in found)


def _count_kernels(options: argparse.Namespace, console: Console) -> int:
    table = Table("model", "kernels", "of these")
    rows = []
    for name in options.kernels:
        count = kernels_of(name, DTYPES[options.dtype])
        rows.append({"model": name, "dtype": options.dtype, "kernels": dict(sorted(count.items()))})
        each = ", ".join(f"{kernel} {n}" for kernel, n in sorted(count.items()))
        table.add_row(name, str(count.total()), each)
    console.print(table)
    _write(options, rows)
    return 0


def _write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if options.json:
        found = {"command": options.command, **describe(torch.device("cpu")), "rows": rows}
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


def _part_of(file: str) -> str | None:
    path = Path(file)
    if not path.is_relative_to(LIBRARY):
        return None
    part = path.relative_to(LIBRARY).parts[0]
    return part if part in PARTS else None


def run(options: argparse.Namespace, console: Console) -> int:
    if options.kernels:
        return _count_kernels(options, console)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for name in options.models:
            row, functions = measure(name, options.steps)
            rows.append(row)
            for where, count in functions.most_common(options.calls):
                print(f"  {count:6.1f}  {where}", file=sys.stdout)
    finally:
        torch.set_num_threads(threads)
    heads = "model", "layers", "plain ms", "private ms", "ratio", "first step", "calls a layer"
    table = Table(*heads, "by part")
    for row in rows:
        parts = ", ".join(f"{part} {count:.0f}" for part, count in row["calls_by_part"].items())
        figures = [f"{row[key]:.2f}" for key in ("plain_ms", "private_ms", "ratio")]
        figures += [f"{row[key]:.0f}" for key in ("first_over_later", "calls_per_layer")]
        table.add_row(row["model"], str(row["layers"]), *figures, parts)
    console.print(table)
    _write(options, rows)
    return 0
