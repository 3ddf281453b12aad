"""``subclasses``: models of ``transformers`` whose layers wrap PyTorch's, or spell a norm out.

Scaled embeddings (BART, Gemma), a linear layer that multiplies by ``weight.T`` (Falcon), and
RMSNorms by Llama, Gemma, Qwen3 and T5. Peak memory and CPU time of a private step stand beside
those of an ordinary one, and norms and clipped sums of a small copy in float64 beside those of one
sample at a time (as in ``mixtures``). Every model has its own width and a vocabulary of 20,000.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import environment
from benchmarks.measure import PeakMemory, milliseconds
from benchmarks.mixtures import step_errors
from benchmarks.options import UsageError
from flash_clipping import GradSampleModuleFlashClipping

CPU = torch.device("cpu")
MIB = 2**20

#: What is the same for most of them, by the names that most of them have.
_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Family:
    """One model.

    Attributes:
        kind: what its classes' names begin with.
        task: what they end with.
        config: of the model.
        tolerance: of relative errors in float64; norms of ``transformers`` compute in fp32.
    """

    kind: str
    task: str
    config: dict[str, Any]
    tolerance: float = 5e-7

    @property
    def has_decoder_inputs(self) -> bool:
        return self.task == "ForConditionalGeneration"

    def build(self, vocabulary: int) -> nn.Module:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{self.kind}Config")(
            **self.config, vocab_size=vocabulary, attn_implementation="eager"
        )
        model: nn.Module = getattr(transformers, self.kind + self.task)(config).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    def loss(self, model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean over samples of each one's mean over its tokens."""
        (ids,) = batch
        more = {"decoder_input_ids": ids} if self.has_decoder_inputs else {"use_cache": False}
        logits = model(input_ids=ids, **more).logits
        losses_BT = F.cross_entropy(logits.mT[..., :-1], ids[:, 1:], reduction="none")
        return losses_BT.mean(1).mean()


FAMILIES = {
    "BART": Family(
        "Bart",
        "ForConditionalGeneration",
        {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "scale_embedding": True,
            "forced_eos_token_id": None,
        },
        1e-9,
    ),
    "Falcon": Family(
        "Falcon",
        "ForCausalLM",
        {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    ),
    "Llama": Family("Llama", "ForCausalLM", _DECODER),
    "Gemma": Family("Gemma", "ForCausalLM", _DECODER),
    "Gemma 2": Family("Gemma2", "ForCausalLM", _DECODER),
    "Qwen3": Family("Qwen3", "ForCausalLM", _DECODER),
    "T5": Family(
        "T5",
        "ForConditionalGeneration",
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
        },
    ),
}


@dataclass
class Result:
    """What one model takes, ordinary and private, and the errors of its small copy."""

    model: str
    plain_mib: float
    private_mib: float
    plain_ms: float
    private_ms: float
    norm_error: float
    sum_error: float
    tolerance: float

    @property
    def is_exact(self) -> bool:
        return max(self.norm_error, self.sum_error) <= self.tolerance


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "subclasses",
        help="models of transformers whose layers wrap PyTorch's, or spell a norm themselves",
        description="Peak memory and CPU time of a step, ordinary and private, and errors against "
        "one sample at a time. The exit status is 1 if an error is larger than it may be.",
    )
    parser.add_argument("--families", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=7, help="timed steps, of which the median")
    parser.add_argument("--revision", help="what is measured, if not this working tree")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    try:
        import transformers  # noqa: F401

        import tests.support.autograd  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"run this from the repository's root, with [dev] installed: {error}"
        ) from error
    names = options.families or [*FAMILIES]
    if unknown := set(names) - FAMILIES.keys():
        raise UsageError(f"unknown families {sorted(unknown)}: {', '.join(FAMILIES)}")
    torch.set_num_threads(1)  # process time counts all threads
    results = []
    for name in names:
        results.append(_measured(name, options))
        if options.json:
            record = {
                "kind": "subclasses",
                "environment": environment.describe(CPU, options.revision),
                "command": options.command,
                "rows": [dataclasses.asdict(result) for result in results],
            }
            options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    console.print(_table(results))
    return 0 if all(result.is_exact for result in results) else 1


def _measured(name: str, options: argparse.Namespace) -> Result:
    family = FAMILIES[name]
    torch.manual_seed(1)
    shape = options.batch, options.seq
    batch = (torch.randint(2, options.vocabulary, shape),)
    found = []
    for private in (False, True):
        found += _taken(family, batch, options.vocabulary, options.steps, private)
    small = family.build(31).double()
    for param in small.parameters():
        if param.dim() == 1:  # scales that are all 1 tell nothing
            nn.init.normal_(param, mean=0.5)
    errors = step_errors(small, small, (torch.randint(2, 31, (4, 7)),), family.loss)
    plain_mib, plain_ms, private_mib, private_ms = found
    return Result(
        name,
        plain_mib,
        private_mib,
        plain_ms,
        private_ms,
        errors.norms,
        errors.sums,
        family.tolerance,
    )


def _taken(
    family: Family, batch: tuple[Tensor, ...], vocabulary: int, steps: int, private: bool
) -> tuple[float, float]:
    """Peak memory in MiB, and the median CPU time of a step in ms."""
    with PeakMemory(CPU) as memory:
        model: Any = family.build(vocabulary)
        if private:
            model = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)

        step = functools.partial(_step, family, model, batch)
        step()
        step()
        with memory.measured():
            step()
    times = [milliseconds(CPU, step, "cpu") for _ in range(steps)]
    return memory.peak / MIB, statistics.median(times)


def _step(family: Family, model: Any, batch: tuple[Tensor, ...]) -> None:
    model.zero_grad(set_to_none=True)
    family.loss(model, batch).backward()


def _table(results: list[Result]) -> Table:
    table = Table(title="A step with one thread: ordinary, private (ratio)")
    for heading in ("model", "peak, MiB", "CPU time, ms", "error of norms", "of sums"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in results:
        memory, time = row.private_mib / row.plain_mib, row.private_ms / row.plain_ms
        table.add_row(
            row.model,
            f"{row.plain_mib:.0f}, {row.private_mib:.0f} ({memory:.2f})",
            f"{row.plain_ms:.0f}, {row.private_ms:.0f} ({time:.2f})",
            f"{row.norm_error:.0e}",
            f"{row.sum_error:.0e}",
        )
    return table
