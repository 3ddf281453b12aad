"""What tests of compiled models share: small language models, a backend that counts, a check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.compiled.regions import Region
from tests.support.cases import bound_between, check_case, make_case, step_case
from tests.support.models import Case, ids
from tests.support.oracle import Truth, per_sample_truth


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


class Backend:
    """AOTAutograd without Inductor, which counts the graphs that it gets."""

    def __init__(self, name: str = "aot_eager"):
        self.run = torch._dynamo.lookup_backend(name)
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self.run(graph, inputs)


class Block(nn.Module):
    def __init__(self, width: int, checkpointing: bool = False):
        super().__init__()
        self.checkpointing = checkpointing
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x)), inplace=True))


class Attending(Block):
    def __init__(self, width: int, checkpointing: bool = False):
        super().__init__(width, checkpointing)
        self.before = nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def body(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).chunk(3, dim=-1)
        return super().body(x + self.out(torch.softmax(q @ k.mT, dim=-1) @ v))


class Language(nn.Module):
    """Tokens in, logits out; blocks between."""

    def __init__(self, checkpointing: bool = False, blocks: int = 1):
        super().__init__()
        self.tokens = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(Block(8, checkpointing) for _ in range(blocks))
        self.head = nn.Linear(8, 13)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Transformer(Language):
    """A head tied to the embedding; positions are an embedding that is expanded over the batch."""

    def __init__(self, checkpointing: bool = False):
        super().__init__(blocks=0)
        self.positions, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.blocks.append(Attending(8, checkpointing))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def lm_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    (ids,) = batch
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").sum(1)


LM = Case(Language, ids(5, 6, vocab=13), lm_loss)


def wrap(model: nn.Module, **options: Any) -> GradSampleModuleFlashClipping:
    return GradSampleModuleFlashClipping(model, **options)


def compare(
    module: GradSampleModuleFlashClipping,
    truth: Truth,
    case: Case,
    batch: tuple[Tensor, ...],
    bound: float,
    tolerance: float = 1e-5,
    steps: int = 2,
) -> None:
    """The first step is rehearsed and compiled; the next finds all that."""
    for _ in range(steps):
        module.zero_grad(set_to_none=True)
        step_case(module, case, batch, "mean")
        check_case(module, truth, bound, tolerance)


def compiled_exactly(case: Case, **options: Any) -> GradSampleModuleFlashClipping:
    """Two steps in float32, compiled with these options, are those of single samples."""
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(**options)
    compare(module, truth, case, batch, bound)
    return module


def region_of(module: GradSampleModuleFlashClipping) -> Region:
    region = module._taps.of_root.instance_forward
    assert isinstance(region, Region)
    return region


def last_layout(module: GradSampleModuleFlashClipping) -> Any:
    return next(reversed(region_of(module)._layouts.values()))


class Adapter(nn.Module):
    """LoRA as it mostly is: two small layers beside one that is frozen."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 0.5


def with_adapters() -> nn.Module:
    model = Language().requires_grad_(False)
    for block in model.blocks:
        for name in ("up", "down"):
            setattr(block, name, Adapter(getattr(block, name)))
    return model
