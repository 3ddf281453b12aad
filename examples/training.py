"""What the two examples share: command line, choice of method, training loop, report.

An example describes its model and data in a `Task` and hands it to `run`. Everything that
depends on the privacy method is in `make_private`; the loop below it is an ordinary PyTorch loop.

Two things a real release must do differently: with another method than flash, turn on Opacus'
`secure_mode` (its noise comes from PyTorch's seeded generator here), and keep the training loss to
itself (it is computed on private data and ε does not cover it).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import sharding
import torch
from interrupts import StopRequest
from opacus import PrivacyEngine
from plots import Curves, draw
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flash_clipping.engine.accounting import ADD_OR_REMOVE
from flash_clipping.trainers.dashboard import ClippingStatistics, line

METHODS = ("flash", "ghost", "hooks", "nonprivate")
# Options that may change between a run and its continuation; all others must stay.
FREE_ON_RESUME = {"resume", "checkpoint", "plot", "device", "threads", "max_steps"}


class InMemoryDataset(Dataset):
    """Tensors that are indexed a whole batch at a time (`__getitems__`), on any device."""

    def __init__(self, *tensors: torch.Tensor):
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        chosen = torch.tensor(indices, dtype=torch.long, device=self.tensors[0].device)
        return tuple(tensor[chosen] for tensor in self.tensors)

    def loader(self, batch_size: int) -> DataLoader:
        return DataLoader(self, batch_size=batch_size, shuffle=True, collate_fn=tuple)


@dataclass
class Task:
    """One example: what is trained, on what, and how it is judged."""

    name: str
    model: nn.Module
    criterion: nn.Module  # has a `reduction` attribute, as PyTorch's losses do
    train: InMemoryDataset
    evaluate: Callable[[nn.Module], float]
    metric: str  # what `evaluate` returns, in words
    metric_format: str  # and in print, e.g. "{:.1%}"
    blocks: Sequence[nn.Module] = ()  # that --shard fsdp2 gathers one at a time
    cuts: Mapping[str, str] = field(default_factory=dict)  # of layers by --shard tp


@dataclass
class Report:
    """What a run leaves behind; this is also what the final table shows."""

    method: str
    step: int = 0
    total_steps: int = 0
    losses: list[float] = field(default_factory=list)  # one per step
    metrics: list[tuple[int, float]] = field(default_factory=list)  # (step, metric)
    epsilons: list[tuple[int, float]] = field(default_factory=list)  # (step, ε)
    # Of the samples since the entry before, where the method has norms: (step, value)
    median_norms: list[tuple[int, float]] = field(default_factory=list)
    clipped_shares: list[tuple[int, float]] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    peak_memory_mib: float = 0.0

    @property
    def loss(self) -> float:
        """Mean over the last ten steps: a single Poisson batch is noisy."""
        recent = [loss for loss in self.losses[-10:] if loss == loss]  # NaN: of no samples
        return sum(recent) / len(recent) if recent else float("nan")

    @property
    def metric(self) -> float:
        return self.metrics[-1][1]

    @property
    def epsilon(self) -> float:
        return self.epsilons[-1][1]


def argument_parser(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """The options that both examples have; `defaults` are the example's own values."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--method", choices=METHODS, default="flash", help="how to clip (%(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="autocast (%(default)s)")
    add("--epochs", type=int, help="passes over the data, in expectation (%(default)s)")
    add("--batch-size", type=int, help="expected size of a Poisson batch (%(default)s)")
    add("--lr", type=float, help="learning rate of Adam (%(default)s)")
    add("--epsilon", type=float, help="privacy budget of the whole run (%(default)s)")
    add("--delta", type=float, default=1e-5, help="δ of the (ε, δ) guarantee (%(default)s)")
    add("--max-grad-norm", type=float, default=1.0, help="clipping bound C (%(default)s)")
    add("--seed", type=int, default=0, help="of the first parameters (%(default)s)")
    add(
        "--repeatable",
        action="store_true",
        help="flash: batches and noise from --seed, too; for debugging, as they are no secret then",
    )
    add("--threads", type=int, help="of PyTorch on the CPU (%(default)s; None: its own choice)")
    add("--max-steps", type=int, help="stop cleanly after this many steps")
    add("--checkpoint", type=Path, help="(runs/NAME-METHOD.pt)")
    add("--resume", action="store_true", help="continue from the checkpoint")
    add("--plot", type=Path, help="(runs/NAME-METHOD.png)")
    parser.set_defaults(**defaults)
    return parser


def make_private(
    args: argparse.Namespace, task: Task, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> tuple[PrivacyEngine, nn.Module, torch.optim.Optimizer, Callable, DataLoader]:
    """Only these lines differ between flash clipping, Opacus and no privacy."""
    if args.method == "flash":
        from flash_clipping import FlashPrivacyEngine

        engine = FlashPrivacyEngine(seed=args.seed if args.repeatable else None)
    else:
        engine = PrivacyEngine()
    if args.method == "nonprivate":
        return engine, task.model, optimizer, task.criterion, loader

    model, optimizer, *criterion, loader = engine.make_private_with_epsilon(
        module=task.model,
        optimizer=optimizer,
        criterion=task.criterion,
        data_loader=loader,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        epochs=args.epochs,
        max_grad_norm=args.max_grad_norm,
        grad_sample_mode=args.method,
    )
    # "flash" returns the criterion that it is given, and so does Opacus' "ghost"; "hooks" does not.
    return engine, model, optimizer, criterion[0] if criterion else task.criterion, loader


def get_rng_state(loader: DataLoader) -> dict[str, Any]:
    """Opacus draws batches and noise from PyTorch's global generators; flash draws from streams, of
    which a checkpoint tells how far they had come. (The engine keeps that of the noise.)"""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    stream = getattr(loader.batch_sampler, "stream", None)
    batches = None if stream is None else stream.state_dict()
    return {"cpu": torch.get_rng_state(), "cuda": cuda, "batches": batches}


def set_rng_state(state: dict[str, Any], loader: DataLoader) -> None:
    torch.set_rng_state(state["cpu"])
    if state["batches"]:
        loader.batch_sampler.stream.load_state_dict(state["batches"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def batches(loader: DataLoader, step: int, total_steps: int, rng: dict | None) -> Iterator[Any]:
    """The batches of steps `step` to `total_steps`, as an uninterrupted run would draw them.

    A new iterator draws a seed from the global generator. In an uninterrupted run that happened
    before the state was saved, unless the run stopped between two epochs.
    """
    while step < total_steps:
        position = step % len(loader)
        if rng is not None and position == 0:
            set_rng_state(rng, loader)
        iterator = iter(loader)
        if rng is not None and position > 0:
            set_rng_state(rng, loader)
        rng = None
        for batch in islice(iterator, min(len(loader) - position, total_steps - step)):
            yield batch
            step += 1


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(args).items() if key not in FREE_ON_RESUME}


def load(
    args: argparse.Namespace, engine: PrivacyEngine, model: nn.Module, optimizer: Any
) -> tuple[Report, dict[str, Any] | None]:
    """Restores model, optimizer and accountant; returns the report so far and the RNG state.

    Shards draw noise from new keys, and batches too.
    """
    if sharding.is_running():
        saved = sharding.load(args.checkpoint, engine, model, optimizer)
    else:
        saved = engine.load_checkpoint(
            path=args.checkpoint,
            module=model,
            optimizer=optimizer,
            torch_load_kwargs={"map_location": "cpu"},
        )
    now = settings_of(args)
    different = [
        f"--{key.replace('_', '-')} was {value}, is {now[key]}"
        for key, value in saved["settings"].items()
        if value != now[key]
    ]
    if different:
        # The noise multiplier follows from these, and so does the ε that was promised.
        sys.exit(f"--resume: {args.checkpoint} was made by another run: {'; '.join(different)}")
    return Report(**saved["report"]), saved.get("rng")


def save(
    args: argparse.Namespace,
    engine: PrivacyEngine,
    model: nn.Module,
    optimizer: Any,
    loader: DataLoader,
    report: Report,
) -> None:
    """Writes beside the old checkpoint and swaps, so that an interruption cannot leave half."""
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    saved = {"settings": settings_of(args), "report": vars(report)}
    if sharding.is_running():
        sharding.save(args.checkpoint, engine, model, optimizer, saved)
        return
    unfinished = args.checkpoint.with_suffix(".partial")
    engine.save_checkpoint(
        path=unfinished,
        module=model,
        optimizer=optimizer,
        checkpoint_dict=saved | {"rng": get_rng_state(loader)},
    )
    os.replace(unfinished, args.checkpoint)


def peak_memory_mib(device: str) -> float:
    """CUDA: peak of allocated tensors. CPU: peak resident size of the whole process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def run(args: argparse.Namespace, task: Task) -> Report:
    """Trains `task` as `args` say; prints the table, saves the plot and the checkpoint."""
    args.checkpoint = args.checkpoint or Path("runs", f"{task.name}-{args.method}.pt")
    args.plot = args.plot or Path("runs", f"{task.name}-{args.method}.png")
    if args.resume and not args.checkpoint.exists():
        sys.exit(f"--resume: there is no checkpoint at {args.checkpoint}")
    if args.threads:
        torch.set_num_threads(args.threads)
    console = Console(quiet=not sharding.is_first())
    # Said in the docstring above; expected of a first layer; a first bound that Opacus refines.
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings("ignore", message="Optimal order is the largest alpha")

    # All processes must stop at the same step, and torchrun interrupts them one by one.
    request = StopRequest()
    with nullcontext(request) if sharding.is_running() else request as stop:
        task.model.to(args.device)
        if sharding.is_running():
            sharding.shard(args.shard, task.model, task.blocks, task.cuts)
        optimizer = torch.optim.Adam(task.model.parameters(), lr=args.lr)
        engine, model, optimizer, criterion, loader = make_private(
            args, task, optimizer, task.train.loader(args.batch_size)
        )
        report, rng = Report(args.method, total_steps=args.epochs * len(loader)), None
        if args.resume:
            report, rng = load(args, engine, model, optimizer)
        train(args, task, engine, model, optimizer, criterion, loader, report, rng, stop, console)

    show(args, task, report, console)
    if sharding.is_first():
        plot(args, task, report)
    console.print(f"plot: {args.plot}   checkpoint: {args.checkpoint}")
    return report


def train(
    args: argparse.Namespace,
    task: Task,
    engine: PrivacyEngine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable,
    loader: DataLoader,
    report: Report,
    rng: dict[str, Any] | None,
    stop: StopRequest,
    console: Console,
) -> None:
    """The loop. Fills `report`, writes a checkpoint after every epoch and where it stops."""
    last_step = min(report.total_steps, args.max_steps or report.total_steps)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        console=console,
        expand=True,
    )
    with progress:
        bar = progress.add_task(
            task.name,
            total=report.total_steps,
            completed=report.step,
            status="",
        )
        model.train()
        # Losses and norms stay on the device: reading one would wait. "hooks" has no coefficients.
        pending: list[torch.Tensor] = []
        statistics = ClippingStatistics(model) if hasattr(model, "get_clipping_coef") else None
        started = time.perf_counter()
        for x, y in batches(loader, report.step, last_step, rng):
            optimizer.zero_grad()
            with torch.autocast(
                args.device, dtype=torch.bfloat16, enabled=args.precision == "bf16"
            ):
                loss = criterion(model(x), y)
            loss.backward()
            if statistics is not None:
                statistics.note_backward()
            optimizer.step()
            pending.append(as_tensor(loss))
            report.samples += len(x)
            report.step += 1

            stopping = stop.requested or report.step == last_step
            if stopping or report.step % len(loader) == 0:
                if args.device == "cuda":
                    torch.cuda.synchronize()
                report.seconds += time.perf_counter() - started
                report.losses += [value.item() for value in pending]
                pending.clear()
                report.peak_memory_mib = peak_memory_mib(args.device)
                reading = statistics.read() if statistics else None
                judge(args, task, engine, model, report)
                if reading is not None:
                    report.median_norms.append((report.step, reading.median_norm))
                    report.clipped_shares.append((report.step, reading.clipped_share))
                    console.print(line(report.step, report.epsilon, reading))
                save(args, engine, model, optimizer, loader, report)
                started = time.perf_counter()
                if statistics is not None:  # samples/s of lines and of the table are of training
                    statistics.restart()
            progress.update(bar, completed=report.step, status=status_of(task, report))
            if stopping:
                break

    if report.step < report.total_steps:
        resume = " ".join(["python", *sys.argv, "" if args.resume else "--resume"]).strip()
        console.print(
            f"Stopped after step {report.step} of {report.total_steps}: {spent(args, report)}. "
            f"Continue with: {resume}",
            soft_wrap=True,
        )


def as_tensor(loss: Any) -> torch.Tensor:
    """A detached scalar, also from the loss object of Opacus' "ghost" mode."""
    if isinstance(loss, torch.Tensor):
        return loss.detach()
    return loss.loss_per_sample.detach().mean()


@torch.no_grad()
def judge(
    args: argparse.Namespace, task: Task, engine: PrivacyEngine, model: nn.Module, report: Report
) -> None:
    model.eval()
    report.metrics.append((report.step, task.evaluate(model)))
    model.train()
    private = args.method != "nonprivate"
    epsilon = engine.get_epsilon(args.delta) if private else float("inf")
    report.epsilons.append((report.step, epsilon))


def spent(args: argparse.Namespace, report: Report) -> str:
    if args.method == "nonprivate":
        return "not private (ε = ∞)"
    return f"ε = {report.epsilon:.2f} at δ = {args.delta:g} ({ADD_OR_REMOVE})"


def status_of(task: Task, report: Report) -> str:
    if not report.losses:
        return ""
    return (
        f"loss {report.loss:.3f} · {task.metric_format.format(report.metric)} · "
        f"ε {report.epsilon:.2f}"
    )


def show(args: argparse.Namespace, task: Task, report: Report, console: Console) -> None:
    memory = "peak memory (CUDA)" if args.device == "cuda" else "peak memory (whole process)"
    rate = report.samples / report.seconds if report.seconds else float("nan")
    table = Table(title=f"{task.name}: {args.method} on {args.device}, {args.precision}")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    table.add_row("training loss", f"{report.loss:.3f}")
    table.add_row(task.metric, task.metric_format.format(report.metric))
    table.add_row("privacy", spent(args, report))
    table.add_row("steps", f"{report.step} of {report.total_steps}")
    table.add_row("samples/s", f"{rate:,.0f}")
    table.add_row(memory, f"{report.peak_memory_mib:,.0f} MiB")
    console.print(table)


def plot(args: argparse.Namespace, task: Task, report: Report) -> None:
    curves = Curves(
        title=f"{task.name}: {args.method}, {spent(args, report)}",
        metric_name=task.metric,
        bound=args.max_grad_norm,
        loss=list(enumerate(report.losses, start=1)),
        metric=report.metrics,
        epsilon=[] if args.method == "nonprivate" else report.epsilons,
        median_norm=report.median_norms,
        clipped_share=report.clipped_shares,
    )
    draw(curves, args.plot)
