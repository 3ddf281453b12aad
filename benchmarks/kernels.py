"""``kernels``: every operation against its floor, and the cost model against measuring.

The floors are measured in the same run and in turn with the operations, since clocks vary: the
weight-gradient matmul of the same shape for what computes, a copy for what moves memory.

B samples, T positions, d input features, p output features.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import random
import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks import environment
from benchmarks.measure import milliseconds, settle
from benchmarks.options import DTYPES, check_device
from flash_clipping import ops
from flash_clipping.ops.gram import gram_blocks
from flash_clipping.ops.noise import noisy_means
from flash_clipping.ops.runtime import cost
from flash_clipping.randomness import FEWER_ROUNDS, Purpose, SecretStream

LAYERS = 8
NOISE = SecretStream()
"""Layers in one gram launch; a step has more."""
CALLS = 4
"""Calls in one sample of time."""
HEAD_START = 40
"""Matmuls, of 0.2 ms on an H200, that the device is given before a sample. Meanwhile the host
queues the calls: a small operation takes the host longer than the device, and it is the device
that is measured here. And every operation finds the device as warm as in the middle of a step:
one that has just idled, or copied, runs the next matmul a fifth faster."""
HEAD_START_SIDE = 4096

SHAPES = {
    "cuda": [
        (8, 1024, 2048, 2048),
        (8, 1024, 2048, 5632),
        (4, 2048, 4096, 4096),
        (4, 2048, 4096, 11008),
        (16, 512, 1024, 4096),
        (32, 256, 2048, 2048),
        (32, 256, 2048, 5632),
        (8, 128, 768, 3072),
    ],
    "cpu": [(8, 128, 256, 256), (8, 256, 256, 1024)],
}
ROWS = {"cuda": [(8, 1024, 2048), (32, 1024, 2048), (4, 2048, 4096)], "cpu": [(8, 256, 256)]}
VOCABULARY = 32000
MOST_STANDARD_ERRORS = 5.0


@dataclass
class Result:
    """One operation on one shape.

    Attributes:
        floor: the operation it is compared with, or empty.
        work: useful FLOP of what computes, bytes read and written of what moves memory.
        of_floor: its rate over the floor's.
    """

    group: str
    name: str
    floor: str
    work: float
    milliseconds: list[float] = field(default_factory=list)
    of_floor: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def rate(self) -> float:
        """TFLOP/s or TB/s."""
        return self.work / self.median / 1e9


@dataclass
class Choice:
    """What the cost model chose, and what each algorithm took for norms and clipped sum."""

    shape: tuple[int, int, int, int]
    chosen: str
    milliseconds: dict[str, float]
    regret: float


Candidate = tuple[Result, Callable[[], object]]


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, or 1 if an operation is wrong."""
    options = _parser().parse_args(arguments)
    check_device(options.device)
    console = Console()
    device = torch.device(options.device)
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    torch.manual_seed(0)
    worst = check(device, dtype)
    console.print(f"worst relative error of a norm against float64: {worst:.1e}")
    if not worst <= 1e-5:
        console.print("[bold red]a norm is wrong: nothing is timed[/]")
        return 1
    off = noise_is_off(device, dtype)
    console.print(f"noise is off by {off:.1f} standard errors")
    if not off <= MOST_STANDARD_ERRORS:
        console.print("[bold red]noise is wrong: nothing is timed[/]")
        return 1
    shapes = options.shape or SHAPES[device.type]
    results: list[Result] = []
    choices: list[Choice] = []
    for shape in track(shapes, "linear layers", console=console):
        found = measure(linear_candidates(shape, device, dtype), options.rounds, device)
        results += found
        choices.append(judge(shape, found, device, dtype))
        settle(device)
    for rows in track(options.rows or ROWS[device.type], "rows", console=console):
        results += measure(row_candidates(rows, device, dtype), options.rounds, device)
        settle(device)
    console.print(result_table(results), choice_table(choices))
    if options.json:
        content = {
            "kind": "kernels",
            "environment": environment.describe(device, options.revision),
            "command": shlex.join(["python", "-m", "benchmarks", "kernels", *arguments]),
            "dtype": str(dtype).removeprefix("torch."),
            "results": [
                {**asdict(result), "median": result.median, "rate": result.rate}
                for result in results
            ],
            "choices": [asdict(choice) for choice in choices],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on CUDA, fp32 on a CPU")
    parser.add_argument("--shape", type=integers(4), action="append", metavar="B,T,d,p")
    parser.add_argument("--rows", type=integers(3), action="append", metavar="B,T,d")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each operation")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument("--revision", help="git revision to record where there is no git directory")
    return parser


def integers(count: int) -> Callable[[str], tuple[int, ...]]:
    """Parses an option of so many positive integers, with commas between them."""

    def parse(text: str) -> tuple[int, ...]:
        numbers = tuple(int(part) for part in text.split(","))
        if len(numbers) != count or min(numbers) < 1:
            raise argparse.ArgumentTypeError(f"expected {count} positive integers, as in 8,1024")
        return numbers

    return parse


def check(device: torch.device, dtype: torch.dtype) -> float:
    """The worst relative error of any norm on a small case, against float64."""
    randn = partial(torch.randn, device=device, dtype=dtype)
    A, G = randn(3, 200, 136), randn(3, 200, 264)
    grads = torch.einsum("btp,btd->bpd", G.double(), A.double())
    linear = grads.square().sum((1, 2))
    ids = torch.randint(50, (3, 200), device=device)
    table = torch.nn.functional.one_hot(ids, 50).double().mT @ A.double()
    _, w_Bd, _ = ops.norm_backward(
        A,
        A,
        None,
        torch.ones(3, 200, device=device),
        None,
        input_grad=True,
        weight_grad=True,
        bias_grad=True,
    )
    assert w_Bd is not None
    pairs = [
        (ops.gram_sqnorms(A, [G])[0][0], linear),
        (ops.outer_sqnorms(A, G)[0], linear),
        (ops.embedding_sqnorms(ids, A), table.square().sum((1, 2))),
        (w_Bd.square().sum(1), A.double().square().sum(1).square().sum(1)),
    ]
    sq_B, kept = ops.outer_sqnorms(A, G, store=True)
    assert kept is not None
    pairs.append((sq_B, kept.double().square().sum((1, 2))))
    return max(float((ours / oracle - 1).abs().max()) for ours, oracle in pairs)


def noise_is_off(device: torch.device, dtype: torch.dtype) -> float:
    """How far two tensors' mean squares are from 1, and the mean of their products from 0, in
    standard errors of each."""
    elements = 1 << 19
    zeros = [torch.zeros(elements, device=device, dtype=dtype) for _ in range(2)]
    draw = NOISE.draw(Purpose.NOISE, FEWER_ROUNDS)
    x, y = (noise.double() for noise in noisy_means(zeros, 1.0, 1.0, draw=draw))
    squares = torch.stack([x.square().mean(), y.square().mean()]) - 1
    product = (x * y).mean()
    return float(torch.cat([squares / 2**0.5, product[None]]).abs().max() * elements**0.5)


def linear_candidates(
    shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
) -> list[Candidate]:
    """The floor, and everything that a linear layer's norms and clipped sum can be made of."""
    B, T, d, p = shape
    randn = partial(torch.randn, device=device, dtype=dtype)
    groups = [(randn(B, T, d), [randn(B, T, p)]) for _ in range(LAYERS)]
    A, (G,) = groups[0]
    coef = torch.rand(B, device=device)
    grads = ops.outer_sqnorms(A, G, store=True)[1]
    assert grads is not None
    group = f"B {B}, T {T}, d {d}, p {p}"
    matmul = 2.0 * B * T * d * p
    moved = float(d * p * (B * A.element_size() + 4))  # the sum is in fp32
    return [
        (Result(group, "matmul", "", matmul), lambda: G.flatten(0, 1).mT @ A.flatten(0, 1)),
        (
            Result(group, "gram", "matmul", LAYERS * float(B) * T * T * (d + p)),
            lambda: gram_blocks(groups),
        ),
        # In parts, as a step takes them: it adds up those of all layers in one go.
        (
            Result(group, "outer", "matmul", matmul),
            lambda: ops.outer_sqnorms(A, G, in_parts=True),
        ),
        (
            Result(group, "outer_store", "matmul", matmul),
            lambda: ops.outer_sqnorms(A, G, store=True, in_parts=True),
        ),
        (Result(group, "clipped_sum", "matmul", matmul), lambda: ops.clipped_sums(A, [G], coef)),
        copy_candidate(group, B * p * d, device, dtype),
        (Result(group, "weighted_sum", "copy", moved), lambda: ops.weighted_sum(grads, coef)),
        *symmetric_candidates(group, A),
    ]


def symmetric_candidates(group: str, A: Tensor) -> list[Candidate]:
    """quack's kernel for symmetric products, where quack-kernels is installed and may run: it
    writes ``A Aᵀ`` out, and Gram norms need a second one. A bound for what they could take."""
    if not A.is_cuda or A.dtype == torch.float32 or importlib.util.find_spec("quack") is None:
        return []
    symmetric = importlib.import_module("quack.gemm_interface").gemm_symmetric
    B, T, d = A.shape
    out = A.new_empty(B, T, T)
    result = Result(group, "symmetric", "matmul", float(B) * T * T * d)
    return [(result, lambda: symmetric(A, A.mT, out=out))]


def row_candidates(
    rows: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> list[Candidate]:
    """The floor, and what moves memory."""
    B, T, d = rows
    x = torch.randn(B, T, d, device=device, dtype=dtype)
    G = torch.randn_like(x)
    coef, weight = torch.rand(B, device=device), torch.ones(d, device=device, dtype=dtype)
    mean, rstd = torch.zeros(B, T, device=device), torch.ones(B, T, device=device)
    ids = torch.randint(VOCABULARY, (B, T), device=device)
    statistics_B1 = torch.ones(B, 1, device=device)
    once = float(x.numel() * x.element_size())
    group = f"B {B}, T {T}, d {d}"

    def norm(mean: Tensor | None) -> object:
        return ops.norm_backward(
            x, G, mean, rstd, weight, input_grad=True, weight_grad=True, bias_grad=True
        )

    return [
        copy_candidate(group, x.numel(), device, dtype),
        (Result(group, "row_scale", "copy", once + 4 * x.numel()), lambda: ops.row_scale(x, coef)),
        (Result(group, "layer_norm", "copy", 3 * once), lambda: norm(mean)),
        (Result(group, "rms_norm", "copy", 3 * once), lambda: norm(None)),
        # In parts, as a step takes them: what comes in parts it adds up by itself.
        (
            Result(group, "embedding", "copy", once),
            lambda: ops.embedding_sqnorms(ids, G, in_parts=True),
        ),
        # As many parameters as samples.
        (
            Result(group, "noise", "copy", 2 * once),
            lambda: noisy_means(list(x), 1.0, 2.0, draw=NOISE.draw(Purpose.NOISE, FEWER_ROUNDS)),
        ),
        (
            Result(group, "group_norm", "copy", 2 * once),  # positions as channels
            lambda: ops.group_norm_grads(x, G, statistics_B1, statistics_B1),
        ),
    ]


def copy_candidate(
    group: str, elements: int, device: torch.device, dtype: torch.dtype
) -> Candidate:
    source = torch.randn(elements, device=device, dtype=dtype)
    target = torch.empty_like(source)
    work = 2.0 * elements * source.element_size()
    return Result(group, "copy", "", work), lambda: target.copy_(source)


def measure(candidates: list[Candidate], rounds: int, device: torch.device) -> list[Result]:
    """Every candidate in turn, ``rounds`` times; rates relative to the floor of the same run."""
    for _, call in candidates:
        call()  # compiles
    busy: Callable[[], object] = nothing
    if device.type == "cuda":
        square = torch.randn(HEAD_START_SIDE, HEAD_START_SIDE, device=device, dtype=torch.bfloat16)
        busy = partial(torch.mm, square, square, out=torch.empty_like(square))
    order = random.Random(0)
    for _ in range(rounds):
        for result, call in order.sample(candidates, len(candidates)):
            result.milliseconds.append(sample(call, device, busy))
    results = [result for result, _ in candidates]
    floors = {result.name: result.rate for result in results}
    for result in results:
        if result.floor:
            result.of_floor = result.rate / floors[result.floor]
    return results


def nothing() -> None:
    """No head start: on a CPU the host is the device."""


def sample(
    call: Callable[[], object], device: torch.device, busy: Callable[[], object] = nothing
) -> float:
    """Milliseconds of one call, of ``CALLS`` in a row, after ``HEAD_START`` calls of ``busy``."""

    def run() -> None:
        for _ in range(CALLS):
            call()

    if device.type != "cuda":
        return milliseconds(device, run) / CALLS
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    for _ in range(HEAD_START):
        busy()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS


def judge(
    shape: tuple[int, int, int, int],
    results: Iterable[Result],
    device: torch.device,
    dtype: torch.dtype,
) -> Choice:
    """What each algorithm takes in all, and what the cost model's choice loses."""
    B, T, d, p = shape
    took = {result.name: result.median for result in results}
    totals = {
        "gram": took["gram"] / LAYERS + took["clipped_sum"],
        "outer": took["outer"] + took["clipped_sum"],
        "outer_store": took["outer_store"] + took["weighted_sum"],
    }
    chosen = cost.choose_on(device.type, B, T, d, p, dtype.itemsize, may_store=True)
    allowed = dict(totals)
    if not cost.may_hold_gradients(T=T, d=d, p=p):
        del allowed["outer_store"]
    regret = 0.0
    if chosen in allowed:  # one position: nothing to choose
        regret = allowed[chosen] / min(allowed.values()) - 1
    return Choice(shape, chosen, totals, regret)


def result_table(results: list[Result]) -> Table:
    table = Table("shape", "operation", "time (µs)", "rate", "of its floor", title="operations")
    for result in results:
        unit = "TB/s" if "copy" in (result.name, result.floor) else "TFLOP/s"
        share = "" if result.of_floor is None else f"{result.of_floor:.2f}"
        table.add_row(
            result.group,
            result.name,
            f"{result.median * 1e3:.1f}",
            f"{result.rate:.3g} {unit}",
            share,
        )
    return table


def choice_table(choices: list[Choice]) -> Table:
    table = Table("shape", "gram", "outer", "outer_store", "chosen", "regret", title="cost model")
    for choice in choices:
        times = (f"{choice.milliseconds[name] * 1e3:.0f}" for name in choice.milliseconds)
        table.add_row(str(choice.shape), *times, choice.chosen, f"{choice.regret:.1%}")
    return table
