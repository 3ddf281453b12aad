"""``trainer``: what a user of a trainer waits for, from the process's start.

Every model is fine-tuned by ``transformers.Trainer`` and by ``PrivateTrainer`` with their default
options: fp32 weights under bf16 autocast, AdamW, texts of many lengths, Poisson batches. Each run
is a process of its own, and the two take turns. Weights are random; texts are Python's own manual,
as bytes, so that there is something to learn.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import environment
from benchmarks.huggingface import of_depth
from benchmarks.options import UsageError
from flash_clipping import Kernels, PrivacyArguments

#: How far norms in fp32 may be from those of single samples in float64, relative.
APART = 1e-4

#: Steps that a window ends with; the first begins with the process.
WINDOWS = (1, 12, 42, 100, 200)

#: Heading of what both have learnt.
LOSS = "loss: `Trainer`, private"

METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "private": {},
    "private-eager": {"kernels": Kernels(cuda_graphs="off")},
}


class Task(NamedTuple):
    """A model, the lengths of its texts (or images), and how many are in a batch."""

    cls: str
    config: dict[str, Any]
    batch: int
    lengths: tuple[int, int] = (0, 0)
    classes: int = 0
    lora: int = 0

    @property
    def seq2seq(self) -> bool:
        return "ConditionalGeneration" in self.cls

    def build(self, layers: int | None = None) -> nn.Module:
        """The model, with so many layers if not with its own number of them."""
        import transformers

        kind = getattr(transformers, self.cls)
        model: nn.Module = kind(kind.config_class(**of_depth(self.config, layers)))
        if self.lora:
            import peft

            more: Any = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
            model = peft.get_peft_model(model, peft.LoraConfig(r=self.lora, **more))
        return model

    def arguments(self, **more: Any) -> Any:
        """Of a trainer that reports nothing."""
        import transformers as tr

        kind = tr.Seq2SeqTrainingArguments if self.seq2seq else tr.TrainingArguments
        use_cpu = not torch.cuda.is_available()
        folder = tempfile.mkdtemp()
        return kind(output_dir=folder, report_to=[], disable_tqdm=True, use_cpu=use_cpu, **more)

    def trainer(self, private: bool) -> Any:
        """The class that trains it."""
        import transformers as tr

        from flash_clipping.trainers.transformers import PrivateSeq2SeqTrainer, PrivateTrainer

        if private:
            return PrivateSeq2SeqTrainer if self.seq2seq else PrivateTrainer
        return tr.Seq2SeqTrainer if self.seq2seq else tr.Trainer


_LIST = Path(__file__).with_name("trainer.yaml").read_text(encoding="utf-8")
TASKS = {name: Task(**row) for name, row in yaml.safe_load(_LIST).items()}


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """``count`` texts, or images, that were drawn once; of images few, which come again."""

    def __init__(self, task: Task, count: int):
        random = torch.Generator().manual_seed(0)
        is_text = any(task.lengths)
        draw = functools.partial(_text, _manual()) if is_text else _image
        self.count = count
        self.rows = [draw(task, random) for _ in range(count if is_text else min(count, 512))]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.rows[index % len(self.rows)])


def _manual() -> Tensor:
    from pydoc_data.topics import topics

    text = "\n".join(topics.values()).encode("ascii", "replace")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long() + 5


def _number(low: int, high: int, random: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (1,), generator=random))


def _text(manual: Tensor, task: Task, random: torch.Generator) -> dict[str, Any]:
    length = _number(*task.lengths, random)
    start = _number(0, len(manual) - length - 65, random)
    ids = manual[start : start + length]
    row: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
    if task.classes:  # is it a text, or one whose letters were mixed?
        row["labels"] = _number(0, task.classes - 1, random)
        ids = ids[torch.randperm(length, generator=random)] if row["labels"] else ids
    elif task.seq2seq:
        row["labels"] = manual[start + length :][: _number(16, 64, random)]
    else:
        row["labels"] = ids.clone()
    return row | {"input_ids": ids}


def _image(task: Task, random: torch.Generator) -> dict[str, Any]:
    label = _number(0, task.classes - 1, random)
    of_class = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(label))
    noise = torch.randn(3, 224, 224, generator=random)
    return {"pixel_values": noise + of_class.repeat(1, 56, 56), "labels": label}


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Texts are padded to a multiple of 8, as tokenizers do."""
    batch = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        if not isinstance(values[0], Tensor):
            batch[key] = torch.tensor(values)
        elif values[0].dim() == 1:
            width = -(-max(map(len, values)) // 8) * 8
            fill = -100 if key == "labels" else 0
            pad = functools.partial(nn.functional.pad, value=fill)
            batch[key] = torch.stack([pad(x, (0, width - len(x))) for x in values])
        else:
            batch[key] = torch.stack(values)
    return batch


# -- norms beside the truth, before any time ---


def norms_apart(name: str) -> float:
    """The largest relative error of the norms that the private trainer clips by: of a model of two
    layers without dropout, in fp32, beside its own loss of one sample at a time in float64."""
    task, found = TASKS[name], []

    class Watched(task.trainer(private=True)):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
            loss: Tensor = super().training_step(model, inputs, *args)
            norms = self.run.hooks.get_norm_sample()
            found.append((self._prepare_inputs(inputs.parts[0]), norms[: inputs.sizes[0]]))
            return loss

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # in which convolutions are, unless told
    model = task.build(2)
    for module in model.modules():
        for key, value in vars(module).items():
            if ("dropout" in key or isinstance(module, nn.Dropout)) and isinstance(value, float):
                setattr(module, key, 0.0)
    truth = copy.deepcopy(model).double()
    arguments = task.arguments(per_device_train_batch_size=4, max_steps=1)
    privacy = PrivacyArguments(noise_multiplier=1.0, target_delta=1e-6, max_grad_norm=1.0, seed=0)
    Watched(
        model=model,
        args=arguments,
        train_dataset=Rows(task, 64),
        data_collator=collate,
        privacy=privacy,
    ).train()
    batch, norms = found[0]
    truth.to(norms.device).train()
    weights = [p for p in truth.parameters() if p.requires_grad]
    apart = 0.0
    for b, norm in enumerate(norms.tolist()):
        one = {key: x[b : b + 1] for key, x in batch.items()}
        one = {key: x.double() if x.is_floating_point() else x for key, x in one.items()}
        grads = torch.autograd.grad(truth(**one).loss, weights, allow_unused=True)
        own = float(torch.stack([g.norm() for g in grads if g is not None]).norm())
        apart = max(apart, abs(norm - own) / own)
    return apart


# -- one run: a process of its own -----------------------------------------------------------------


def measure(
    name: str, method: str, steps: int, small: bool, noise: float, bound: float = 1.0
) -> dict[str, Any]:
    """Train, and tell what it took."""
    import transformers as tr

    tr.logging.set_verbosity_error()
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flash_clipping").addHandler(listener)
    logging.getLogger("flash_clipping").setLevel(logging.INFO)
    task, on_gpu = TASKS[name], torch.cuda.is_available()
    torch.manual_seed(0)
    model = task.build(2 if small else None)
    batch = 4 if small else task.batch
    data = Rows(task, 64 * batch)
    clock = _clock(tr.TrainerCallback)
    arguments = task.arguments(
        per_device_train_batch_size=batch,
        max_steps=steps,
        bf16=on_gpu,
        logging_steps=50,
        save_strategy="no",
        dataloader_num_workers=4 if on_gpu else 0,
        learning_rate=1e-4,
        max_grad_norm=bound,  # of a batch's gradient, or of a sample's: losses compare
    )
    given = {"model": model, "args": arguments, "train_dataset": data, "data_collator": collate}
    if (options := METHODS[method]) is not None:
        given["privacy"] = PrivacyArguments(
            noise_multiplier=noise, target_delta=1e-6, max_grad_norm=bound, **options
        )
    trainer = task.trainer(private=options is not None)(**given, callbacks=[clock])
    clock.trainer = trainer
    trainer.train()
    graphs = clock.graphs
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {
        "model": name,
        "method": method,
        "windows": clock.windows(),
        "first_seconds": round(clock.first, 4),
        "allocated_gib": clock.gib(torch.cuda.max_memory_allocated) if on_gpu else None,
        "reserved_gib": clock.gib(torch.cuda.max_memory_reserved) if on_gpu else None,
        "losses": [round(x, 4) for x in losses],
        "loss": losses[-1] if losses else None,
        "replays": [graphs.replays, graphs.calls] if graphs is not None else None,
        "said": said,
    }


def _clock(base: Any) -> Any:
    """A callback that reads the time where windows end, when the device has come to there."""

    class Clock(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self.at: dict[int, float] = {}
            self.first = 0.0
            self.trainer: Any = None
            self.graphs: Any = None

        def _now(self) -> float:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return time.perf_counter()

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.at[0] = self._now()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (*WINDOWS, args.max_steps):
                self.at[state.global_step] = self._now()
                if state.global_step == 1:
                    self.first = self.at[1] - self.at[0]
                    hooks = getattr(getattr(self.trainer, "run", None), "hooks", None)
                    self.graphs = getattr(hooks, "_graphs", None)

        def windows(self) -> dict[str, float]:
            """Milliseconds of a step, by windows."""
            steps = sorted(self.at)
            pairs = zip(steps, steps[1:], strict=False)
            return {f"{a}-{b}": 1e3 * (self.at[b] - self.at[a]) / (b - a) for a, b in pairs}

        def gib(self, read: Callable[[], int]) -> float:
            return round(read() / 2**30, 2)

    return Clock()


# -- the command -----------------------------------------------------------------------------------


def add_parser(commands: Any) -> None:
    """Add ``trainer`` to the command line."""
    parser = commands.add_parser(
        "trainer", help="Trainer beside PrivateTrainer, by default options"
    )
    parser.add_argument("models", nargs="*", help=f"of {', '.join(TASKS)}; all without")
    parser.add_argument("--methods", default="plain,private", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--steps", type=int, default=WINDOWS[-1])
    parser.add_argument("--rounds", type=int, default=1, help="processes of each method")
    parser.add_argument(
        "--noise", type=float, default=1e-12, help="noise multiplier: so small that losses compare"
    )
    parser.add_argument(
        "--bound", type=float, default=1e6, help="clipping bound: so large that losses compare"
    )
    parser.add_argument("--small", action="store_true", help="two layers, four samples")
    parser.add_argument("--seconds", type=int, default=240, help="limit of one process")
    parser.add_argument("--json", type=Path, help="where the results are written")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure; with ``--one`` in this process."""
    models, methods = options.models or [*TASKS], options.methods.split(",")
    for known, given in ((TASKS, models), ([*METHODS, "oracle"], methods)):
        if unknown := [name for name in given if name not in known]:
            raise UsageError(f"trainer: found {', '.join(unknown)}; expected {', '.join(known)}")
    if options.one and methods == ["oracle"]:
        print(json.dumps({name: norms_apart(name) for name in models}))
        return 0
    if options.one:
        privacy = options.noise, options.bound
        found = measure(models[0], methods[0], options.steps, options.small, *privacy)
        print(json.dumps(found))
        return 0
    oracle = _in_a_process(models, "oracle", options)
    console.print(json.dumps(oracle))
    if off := [name for name in models if not oracle.get(name, math.inf) <= APART]:
        console.print(f"not timed: the norms of {', '.join(off)} are not those of single samples")
        return 1
    results: list[dict[str, Any]] = []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = {
        "kind": "trainer",
        "environment": environment.describe(device),
        "command": options.command,
        "oracle": oracle,
        "results": results,
    }
    # All models once before any again, for whoever ends it early.
    for _, name, method in itertools.product(range(options.rounds), models, methods):
        results.append(_in_a_process([name], method, options))
        console.print(json.dumps(results[-1]))
        if options.json is not None:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    headings, rows = lines(results)
    shown = Table(*headings)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    return int(any("error" in result for result in results))


def _in_a_process(names: list[str], method: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks", "trainer", *names, "--methods", method, "--one"]
    for name in ("steps", "noise", "bound"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--small"] if options.small else []
    name = names[0]
    environment_of_run = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.seconds, env=environment_of_run
        )
    except subprocess.TimeoutExpired:
        return {"model": name, "method": method, "error": f"over {options.seconds} s"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"model": name, "method": method, "error": done.stderr[-1000:]}
    return found


def lines(results: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a line for each model and method but ``plain``: medians over processes.
    Milliseconds of a step by windows of steps, then ratios to ``plain`` in the last window."""
    columns = [f"{a}-{b}" for a, b in zip(WINDOWS, WINDOWS[1:], strict=False)]
    ways = dict.fromkeys((r["model"], r["method"]) for r in results if "error" not in r)
    found = {}
    for way in ways:
        runs = [r for r in results if (r["model"], r["method"]) == way and "error" not in r]
        found[way] = _Medians(runs)
    made = []
    for name, method in ways:
        base, own = found.get((name, "plain")), found[name, method]
        if method == "plain" or base is None:
            continue
        steps = [f"{own.window(column):.0f}" for column in columns]
        last = columns[-1]
        graphs = own.runs[0]["replays"]
        made.append(
            [
                f"`{name}`, {TASKS[name].batch}" + ("" if method == "private" else f" ({method})"),
                f"{base.window(last):.0f}",
                *steps,
                f"{own.window(last) / base.window(last):.2f}",
                f"{graphs[0]} of {graphs[1]}" if graphs else "none",
                f"{base.of('first_seconds'):.1f}, {own.of('first_seconds'):.1f}",
                f"{base.of('loss'):.2f}, {own.of('loss'):.2f}",
                *[
                    f"{base.of(key):.1f}, {own.of(key):.1f} ({own.of(key) / base.of(key):.2f})"
                    for key in ("allocated_gib", "reserved_gib")
                ],
            ]
        )
    headings = ["model, batch", f"`Trainer`, {columns[-1]}", *columns, "ratio", "replays"]
    headings += ["first step, s", LOSS]
    return [*headings, "allocated, GiB", "reserved, GiB"], made


class _Medians:
    """Medians over the runs of one method."""

    def __init__(self, runs: list[dict[str, Any]]):
        self.runs = runs

    def of(self, key: str) -> float:
        values = [run[key] for run in self.runs if run[key] is not None]
        return statistics.median(values) if values else math.nan

    def window(self, name: str) -> float:
        values = [run["windows"][name] for run in self.runs if name in run["windows"]]
        return statistics.median(values) if values else math.nan
