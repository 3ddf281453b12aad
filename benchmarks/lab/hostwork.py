"""``hostwork``: what a private step costs the host, without the kernels.

Small models wait for the host. On a CPU, every Triton launch is replaced by the look-up that finds
its kernel; the rest of a step is the host's work on the way that a GPU takes. Figures: processor
time of forward and backward beside the plain model's; that of the first step, which shows who is a
sample, over a later one's, both with PyTorch's kernels; and calls per trainable layer, by the part
of the library that makes them (of Python functions and of built-in ones, as ``sys.setprofile``
tells; calls that ``ops/`` makes are not counted).

Results of such a step are wrong, as nothing is computed; its gradients are never used.

``--kernels`` counts the kernels that a first step asks Triton for on a Hopper GPU: what is compiled
on a machine that has compiled nothing. Nothing is compiled, and references do the work.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import flash_clipping
from benchmarks import models
from benchmarks.environment import describe
from benchmarks.options import DTYPES, UsageError
from benchmarks.records import write_json
from benchmarks.survey.inputs import Inputs, image, text, text_to_text
from benchmarks.survey.kinds import Kind
from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proof.gate import Gate

#: Calls that these make are counted.
PARTS = ("capture", "rules", "factors", "finish", "engine")

LIBRARY = Path(flash_clipping.__file__).parent

#: A model, and what it is called with.
Model = tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]


def _kind(cls: str, given: Inputs, **changes: Any) -> Model:
    """A model of ``transformers`` as small as those of the survey."""
    model = Kind(cls, cls, given, changes).build()
    return model, (), given(model)


def _named(name: str) -> Model:
    """A model of :mod:`benchmarks.models` in its own widths, with two layers where it can say."""
    try:
        workload = models.workload(name, batch=4, layers=2)
    except ValueError:
        workload = models.workload(name, batch=4)
    inputs, _ = workload.draw(torch.Generator().manual_seed(0))
    return workload.build(), (inputs,), {}


#: Small models with as many layers as those that they are named after, or half of them; and a wide
#: one, whose kernels are counted: attention, then convolutions up to the image's size.
MODELS: dict[str, Callable[[], Model]] = {
    "bert": partial(_kind, "BertForSequenceClassification", text(), num_hidden_layers=12),
    "smollm": partial(
        _kind, "LlamaForCausalLM", text(), num_hidden_layers=12, tie_word_embeddings=True
    ),
    "t5": partial(
        _kind, "T5ForConditionalGeneration", text_to_text(), num_layers=6, num_decoder_layers=6
    ),
    "qwen3-moe": partial(_kind, "Qwen3MoeForCausalLM", text(), num_hidden_layers=6),
    "wrn": partial(_named, "wrn-tiny"),
    "dpt": partial(
        _kind,
        "DPTForDepthEstimation",
        image(112),
        hidden_size=512,
        num_attention_heads=8,
        intermediate_size=2048,
        image_size=112,
        patch_size=16,
        num_hidden_layers=4,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[128, 256, 512, 512],
        fusion_hidden_size=128,
        is_hybrid=False,
        backbone_config=None,
    ),
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "hostwork",
        help="count what a private step costs the host, with kernels left out",
        description="Processor time of a step beside the plain model's and calls per trainable "
        "layer, on a CPU with stubbed kernels.",
    )
    some = [name for name in MODELS if name != "dpt"]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=some)
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=(*MODELS, *models.NAMES),
        metavar="MODEL",
        help="count the kernels of these models instead: as --models, or as `step --model`",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of --kernels")
    parser.add_argument("--steps", type=int, default=60, help="steps of each that are timed")
    parser.add_argument("--calls", type=int, default=0, metavar="N", help="list the N most called")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.set_defaults(run=run)


class _NoKernels(dict[Hashable, Any]):
    """Every launch finds its kernel here, and it does nothing."""

    def get(self, number: Hashable, _: Any = None) -> Any:
        hash(number)
        return None, self, ()

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_: None


@contextlib.contextmanager
def no_kernels() -> Iterator[None]:
    """Let operations go the way of Triton, whose launches do nothing but look for a kernel."""
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        from flash_clipping.ops.runtime import backend, tiles

        found = mock.patch.object(tiles, "_found", _NoKernels())
        with found, mock.patch.object(backend, "_resolved", _triton):
            yield


def _triton(wanted: str, dtype: torch.dtype, _: str) -> str:
    """The backend that a GPU would have."""
    return "torch" if wanted == "torch" or dtype == torch.float64 else "triton"


def _loss(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Tensor:
    output = model(*args, **kwargs)
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor.flatten(1).square().mean(1).mean()


def _step(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
    model.zero_grad(set_to_none=True)
    _loss(model, args, kwargs).backward()


def measure(name: str, steps: int) -> tuple[dict[str, Any], Counter[str]]:
    """Figures of one model, and the functions that its step calls most, per trainable layer."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(MODELS[name]())
    (plain, *batch), (other, *_) = made
    both = {"plain": plain, "private": GradSampleModuleFlashClipping(other)}
    _step(plain, *batch)
    # With kernels: the first step, in which all is proven, and later ones.
    first, *later = [_seconds(both["private"], batch) for _ in range(5)]
    times: dict[str, list[float]] = {key: [] for key in both}
    with no_kernels():
        for _ in range(steps + 4):
            for key, model in both.items():
                times[key].append(_seconds(model, batch))
        both["private"].zero_grad(set_to_none=True)
        by_part, by_function = _calls(lambda: _loss(both["private"], *batch).backward())
    layers = sum(
        any(p.requires_grad for p in module.parameters(recurse=False)) for module in plain.modules()
    )
    medians = {key: 1e3 * statistics.median(found[4:]) for key, found in times.items()}
    row = {
        "model": name,
        "layers": layers,
        "plain_ms": medians["plain"],
        "private_ms": medians["private"],
        "ratio": medians["private"] / medians["plain"],
        "first_over_later": first / statistics.median(later),
        "calls_per_layer": by_part.total() / layers,
        "calls_by_part": {part: count / layers for part, count in by_part.most_common()},
    }
    return row, Counter({where: round(count / layers, 1) for where, count in by_function.items()})  # type: ignore[misc]


def _seconds(model: nn.Module, batch: Any) -> float:
    start = time.process_time()
    _step(model, *batch)
    return time.process_time() - start


def _calls(work: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """Calls that the library makes in this thread: by its :data:`PARTS`, and by functions."""
    by_part: Counter[str] = Counter()
    by_function: Counter[str] = Counter()

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event not in ("call", "c_call"):
            return
        caller = frame if event == "c_call" else frame.f_back
        path = Path(caller.f_code.co_filename if caller else "")
        if caller and path.is_relative_to(LIBRARY):
            file = path.relative_to(LIBRARY)
            if file.parts[0] in PARTS:
                by_part[file.parts[0]] += 1
                name = called.__name__ if event == "c_call" else frame.f_code.co_name
                by_function[f"{file}: {caller.f_code.co_name} -> {name}"] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return by_part, by_function


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

    def on_gpu(choose: Callable[..., str]) -> Callable[..., str]:
        return lambda _, *args, **kwargs: choose("cuda", *args, **kwargs)

    # What Triton asks its driver for a kernel to compile.
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    hopper = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    facts: dict[str, Any] = {"sm_count": lambda _: 132, "generation": lambda _: 9}
    facts |= dict.fromkeys(("is_hopper", "starts_early"), lambda _: True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", hopper))
        stack.enter_context(mock.patch.object(knobs.runtime, "jit_cache_hook", note))
        stack.enter_context(mock.patch.multiple(tiles, **facts))
        stack.enter_context(mock.patch.multiple(backend, compilation=found, _resolved=_triton))
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
    model, *batch = MODELS[name]() if name in MODELS else _named(name)
    batch = tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
    wrapped = GradSampleModuleFlashClipping(model.to(dtype))
    comparison = mock.patch.object(Gate, "examine", lambda *_: None)
    with asked_for() as found, _ProductsInFp32(), comparison:
        _loss(wrapped, *batch).backward()
    return Counter(kernel for kernel, _ in found)


def run(options: argparse.Namespace, console: Console) -> int:
    rows: list[dict[str, Any]] = []
    for name in options.kernels or ():
        kernels = dict(sorted(kernels_of(name, DTYPES[options.dtype]).items()))
        rows.append({"model": name, "dtype": options.dtype, "kernels": kernels})
    if not options.kernels:
        torch.set_num_threads(1)
    for name in options.models if not options.kernels else ():
        row, functions = measure(name, options.steps)
        rows.append(row)
        for where, count in functions.most_common(options.calls):
            print(f"  {count:6.1f}  {where}", file=console.file)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(_words, row.values()))
    console.print(table)
    about = {"command": options.command, **describe(torch.device("cpu"))}
    write_json(options.json, about | {"rows": rows})
    return 0


def _words(figure: Any) -> str:
    if isinstance(figure, dict):
        return ", ".join(f"{name} {count:.0f}" for name, count in figure.items())
    return f"{figure:.2f}" if isinstance(figure, float) else str(figure)
