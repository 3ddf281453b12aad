"""``mixtures``: norms and clipped sums of every mixture of experts of ``transformers``.

Small models of each family (``tests/support/mixtures.py``) take one step. Their norms and clipped
sums are compared with those of one sample at a time through an ordinary backward. Two figures are
told for each: the largest relative difference of a sample's norm, and ``|g - r| / |r|`` of the
clipped sums over all trained parameters.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.options import UsageError
from benchmarks.report import Page, table
from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.hugging_face.experts import are_experts

PAGE = Path(__file__).resolve().parent.parent / "docs" / "mixtures.md"
START, END = "<!-- mixtures:start -->", "<!-- mixtures:end -->"

#: What is trained, in models in float64 (their normalizations and softmax are in fp32).
TRAINED = ("all", "experts", "router", "LoRA on attention", "LoRA on experts")
#: What runs the experts, in fp32, against the same models in float64.
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
ALONE = "experts alone"

TOLERANCE = {ALONE: 1e-9, **dict.fromkeys(TRAINED, 5e-7), **dict.fromkeys(IMPLEMENTATIONS, 1e-4)}
ATTENTION = ("q_proj", "q_a_proj", "v_proj", "o_proj")

Loss = Callable[[Any, tuple[Tensor, ...]], Tensor]

#: Largest relative errors of one step: of norms and of sums.
Errors = tuple[float, float]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "mixtures",
        help="errors of every mixture of experts of transformers, and docs/mixtures.md",
        description="The exit status is 1 if an error is larger than it may be.",
    )
    parser.add_argument("--families", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument(
        "--write", action="store_true", help=f"replace what stands between {START} and {END}"
    )
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    try:
        import peft  # noqa: F401

        from tests.support.mixtures import FAMILIES
    except ImportError as error:
        raise UsageError(
            f"run this from the repository's root, with [dev] and peft installed: {error}"
        ) from error
    families = options.families or list(FAMILIES)
    if unknown := set(families) - FAMILIES.keys():
        raise UsageError(f"unknown families {sorted(unknown)}: {', '.join(FAMILIES)}")
    if options.write and set(families) != FAMILIES.keys():
        raise UsageError("the page has all families: leave out --families, or --write")
    found, status = {}, 0
    for family in families:
        found[family] = errors_of(family)
        console.print(family, {name: _cell(errors) for name, errors in found[family].items()})
        for name, errors in found[family].items():
            if not max(errors) <= TOLERANCE[name]:
                console.print(f"[bold red]{family}, {name}: more than {TOLERANCE[name]:.0e}[/]")
                status = 1
    if options.write and not status:
        Page(options.page, START, END, render(found)).write()
        console.print(f"wrote {options.page}")
    return status


def errors_of(family: str) -> dict[str, Errors]:
    """Of one family, by what was trained, and by what ran the experts."""
    from tests.support.mixtures import language_loss, mixture, tokens

    torch.manual_seed(1)
    batch = tokens()
    found = {}
    for trained in TRAINED:
        model = _prepared(mixture(family), trained)
        found[trained] = _errors(model, model, batch, language_loss)
    for implementation in IMPLEMENTATIONS:
        wide = mixture(family)
        narrow = copy.deepcopy(wide).float()
        narrow.set_experts_implementation(implementation)  # type: ignore[operator]
        found[implementation] = _errors(narrow, wide, batch, language_loss)
    block, x = _Alone(mixture(family)), torch.randn(5, 7, 16, dtype=torch.float64)
    found[ALONE] = _errors(block, block, (x,), _squares)
    return found


class _Alone(nn.Module):
    """Experts of a model without the model: in float64 all through."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.experts: Any = next(m for m in model.modules() if are_experts(m))
        self.router = nn.Linear(16, self.experts.num_experts, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).flatten(0, 1).softmax(-1).topk(2, -1)
        y: Tensor = self.experts(x.flatten(0, 1), chosen, weights)
        return y.view_as(x)


def _squares(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    y: Tensor = model(*batch)
    return (y.square() * torch.linspace(0.5, 1.5, y.shape[-1])).flatten(1).sum(1).mean()


def _prepared(model: nn.Module, trained: str) -> nn.Module:
    """What is to be trained, and nothing else; adapters that are no longer zero."""
    if trained == "all":
        return model
    if not trained.startswith("LoRA"):
        ends = (".gate", ".router") if trained == "router" else (".experts",)
        for name, param in model.named_parameters():
            param.requires_grad_(name.rpartition(".")[0].endswith(ends))
        return model
    from peft import LoraConfig, get_peft_model

    path = next(name for name, module in model.named_modules() if are_experts(module))
    matrices = [f"{path.split('.')[-2]}.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    names = {name.split(".")[-1] for name, _ in model.named_modules()}
    on_experts = trained == "LoRA on experts"
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=[] if on_experts else [name for name in ATTENTION if name in names],
        target_parameters=matrices if on_experts else [],
    )
    model = get_peft_model(model, config).double()  # type: ignore[arg-type]
    for param in model.parameters():
        if param.requires_grad:
            nn.init.normal_(param, std=0.3)
    return model


def _errors(model: nn.Module, wide: nn.Module, batch: tuple[Tensor, ...], loss: Loss) -> Errors:
    """A step of ``model``, clipped at the median norm, beside the truth by ``wide``."""
    from tests.support.autograd import truth_by_autograd

    truth = truth_by_autograd(copy.deepcopy(wide), batch, loss)
    bound = truth.norms.median().item() or 1.0
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=bound)
    loss(flash, batch).backward()
    norms_B: Any = flash.get_norm_sample()
    differences_B = (norms_B.double() - truth.norms).abs() / truth.norms.clamp(min=1e-30)
    off = total = 0.0
    for name, expected in truth.clipped(bound).items():
        grad = model.get_parameter(name).grad
        assert grad is not None
        off += (grad.double() - expected).square().sum().item()
        total += expected.square().sum().item()
    return differences_B.max().item(), (off / max(total, 1e-60)) ** 0.5


def _cell(errors: Errors) -> str:
    return f"{errors[0]:.0e}, {errors[1]:.0e}"


def render(found: dict[str, dict[str, Errors]]) -> str:
    """Markdown: two tables, of what was trained and of what ran the experts."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "peft")]
    parts = [f"torch {torch.__version__.split('+')[0]}, {', '.join(versions)}, on a CPU.\n"]
    for heading, columns in (
        ("trained (float64)", [*TRAINED, ALONE]),
        ("implementation (fp32)", IMPLEMENTATIONS),
    ):
        lines = [[family, *(_cell(of[name]) for name in columns)] for family, of in found.items()]
        parts.append(table([heading, *columns], lines))
    return "\n".join(parts)
