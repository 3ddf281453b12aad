"""``packed``: documents end to end in one row, against the same without privacy, and padded.

A decoder reads documents of 16 to 8192 tokens, whose lengths are drawn evenly on a logarithmic
scale. *Packed* they lie end to end in one row and each is a privacy unit; *padded* each is a row,
as long as the longest. Attention runs document by document, or over whole rows where each is one.
Norms are compared with one document at a time in fp32 before anything is timed.

N tokens of all documents, T positions of a row, D width.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import environment, kernels
from benchmarks.measure import settle
from benchmarks.models import Block, SwiGLU
from benchmarks.options import DTYPES
from flash_clipping import GradSampleModuleFlashClipping, Offsets

SHORTEST, LONGEST = 16, 8192
SIZES = {
    "cuda": dict(layers=4, width=2048, hidden=5632, heads=16, vocab=32_000),
    "cpu": dict(layers=1, width=32, hidden=48, heads=2, vocab=64),
}
TOKENS = {"cuda": [8192, 16_384, 32_768], "cpu": [96]}
ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class Attention(nn.Module):
    """Causal attention inside of each document of a single row, or of each row.

    ``lengths`` are known to the host, as they are to whoever packed the documents.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.joint = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.lengths: tuple[int, ...] = ()

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.joint(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # What lies behind the end of a row is padding, which nothing in front of it reads.
        parts = qkv.split(list(self.lengths), dim=3) if len(x_BTD) == 1 else [qkv]
        mixed = torch.cat([_attend(part) for part in parts], dim=2)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def _attend(qkv: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)


class Decoder(nn.Module):
    """Ids ``[B, T]`` to logits ``[B, T, V]``."""

    def __init__(self, *, layers: int, width: int, hidden: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            Block(width, Attention(width, heads), SwiGLU(width, hidden)) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def read(self, lengths: tuple[int, ...]) -> None:
        """How long the documents of the next batches are."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.lengths = lengths

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(ids_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "packed",
        help="documents packed in one row against non-private, and padded",
        description="Norms are compared with one document at a time before anything is timed. "
        "The exit status is 1 if they are wrong.",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on CUDA, fp32 on a CPU")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument("--revision", help="git revision to record where there is no git directory")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Exit status: 0, or 1 if a norm is wrong."""
    device = torch.device(options.device)
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    results: list[kernels.Result] = []
    shapes, errors = {}, {}
    for tokens in options.tokens or TOKENS[device.type]:
        steps = Steps(tokens, device, dtype)
        errors[steps.group] = steps.error()
        console.print(f"{steps.group}: norms are off by {errors[steps.group]:.1e}")
        if not errors[steps.group] <= ROUNDED[dtype]:
            console.print("[bold red]that is too much: nothing is timed[/]")
            return 1
        shapes[steps.group] = steps.lengths
        results += kernels.measure(steps.candidates(), options.rounds, device)
        del steps
        settle(device)
    console.print(result_table(results))
    if options.json:
        content = {
            "kind": "packed",
            "environment": environment.describe(device, options.revision),
            "command": options.command,
            "dtype": str(dtype).removeprefix("torch."),
            "model": SIZES[device.type],
            "lengths": shapes,
            "errors": errors,
            "results": [
                {**asdict(result), "median": result.median, "ratio": ratio(result, results)}
                for result in results
            ],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def draw_lengths(tokens: int) -> tuple[int, ...]:
    """Lengths that add up to so many tokens; the last document is cut."""
    generator = torch.Generator().manual_seed(tokens)
    lengths: list[int] = []
    while (room := tokens - sum(lengths)) > 0:
        drawn = SHORTEST * (LONGEST / SHORTEST) ** torch.rand(1, generator=generator).item()
        lengths.append(min(room, round(drawn)))
    return tuple(lengths)


class Steps:
    """Forward and backward of one batch: packed without privacy, packed, and padded."""

    def __init__(self, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.lengths = draw_lengths(tokens)
        self.group = f"{tokens} tokens, {len(self.lengths)} documents"
        self.device, self.dtype = device, dtype
        generator = torch.Generator().manual_seed(0)
        vocab = SIZES[device.type]["vocab"]
        self.ids_1N = torch.randint(vocab, (1, tokens), generator=generator).to(device)
        self.labels_1N = torch.randint(vocab, (1, tokens), generator=generator).to(device)
        edges = list(itertools.accumulate(self.lengths, initial=0))
        self.offsets = torch.tensor(edges, device=device, dtype=torch.int32)
        self.plain = self._model()
        self.packed = GradSampleModuleFlashClipping(
            self._model(),
            max_grad_norm=1.0,
            loss_reduction="sum",
            sample_of=Offsets("cu_seqlens"),
        )
        self.padded = GradSampleModuleFlashClipping(
            self._model(), max_grad_norm=1.0, loss_reduction="sum"
        )
        self.ids_BT, self.labels_BT = (self._padded(x) for x in (self.ids_1N, self.labels_1N))
        self.labels_BT[self.ids_BT < 0] = -100
        self.ids_BT.clamp_(min=0)

    def _model(self) -> Decoder:
        torch.manual_seed(0)
        with self.device:
            model = Decoder(**SIZES[self.device.type])
        model.read(self.lengths)
        return model.to(self.dtype)

    def _padded(self, x_1N: Tensor) -> Tensor:
        rows = x_1N[0].split(list(self.lengths))
        return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=-100)

    def error(self) -> float:
        """Largest relative error of the shortest and the longest documents' norms, packed and
        padded."""
        oracle = self._model().float()
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        chosen = sorted({*order[:2], *order[-2:]})
        ids, labels = (x[0].split(list(self.lengths)) for x in (self.ids_1N, self.labels_1N))
        true = []
        for b in chosen:
            oracle.zero_grad(set_to_none=True)
            oracle.read((self.lengths[b],))
            _loss(oracle(ids[b][None]), labels[b][None]).backward()
            norms = [p.grad.norm() for p in oracle.parameters() if p.grad is not None]
            true.append(torch.stack(norms).norm())
        worst = 0.0
        for private, backward in ((self.packed, self.step_packed), (self.padded, self.step_padded)):
            backward()
            found = private.get_norm_sample()[chosen]
            worst = max(worst, float(((found - torch.stack(true)) / torch.stack(true)).abs().max()))
        return worst

    def step_plain(self) -> None:
        self.plain.zero_grad(set_to_none=True)
        _loss(self.plain(self.ids_1N), self.labels_1N).backward()

    def step_packed(self) -> None:
        self.packed.zero_grad(set_to_none=True)
        _loss(self.packed(self.ids_1N, cu_seqlens=self.offsets), self.labels_1N).backward()

    def step_padded(self) -> None:
        self.padded.zero_grad(set_to_none=True)
        _loss(self.padded(self.ids_BT), self.labels_BT).backward()

    def candidates(self) -> list[kernels.Candidate]:
        steps: dict[str, Callable[[], None]] = {
            "non-private, packed": self.step_plain,
            "packed": self.step_packed,
            "padded": self.step_padded,
        }
        return [(kernels.Result(self.group, name, "", 0.0), step) for name, step in steps.items()]


def _loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The sum over documents of the sum over their tokens."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")


def ratio(result: kernels.Result, results: list[kernels.Result]) -> float:
    """Time over that of the packed step without privacy."""
    of_group = {r.name: r.median for r in results if r.group == result.group}
    return result.median / of_group["non-private, packed"]


def result_table(results: list[kernels.Result]) -> Table:
    table = Table("documents", "step", "ms", "over non-private packed")
    for result in results:
        found = f"{ratio(result, results):.3f}"
        table.add_row(result.group, result.name, f"{result.median:.2f}", found)
    return table
