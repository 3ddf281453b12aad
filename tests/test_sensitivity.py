"""Sensitivity: removing any sample changes the released sum by at most the clipping bound.

Each sample of a random batch is removed in turn, and the change of ``sum_b coef_b g_b`` over all
parameters is measured in float64, in units of the bound ``C``. What is compared are sums of the
samples' own gradients, so that the reduction does not matter.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.ops import clipped_sums, linear_sqnorms
from tests.support.models import Attention, Block, Scale
from tests.support.profiles import PROFILE, profile

CLASSES, POSITIONS = 7, 8

#: Allowed in fp32, relative to the bound (design, section 5).
SLACK = 1e-5


class TiedHead(nn.Module):
    """A language model of one block, with its head tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(CLASSES, 8), Block(8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.embed(tokens))))


def tokens(size: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, CLASSES, (size, POSITIONS), generator=generator)


def drawn_floats(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda size, generator: torch.randn(size, *shape, generator=generator)


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Tensor]
    opacus: bool = True  # whether Opacus' ghost clipping can run it


MODELS = {
    "mlp": Model(
        lambda: nn.Sequential(
            nn.Linear(12, 32),
            nn.ReLU(),
            nn.LayerNorm(32),
            nn.Linear(32, 16),
            nn.GELU(),
            nn.Linear(16, CLASSES),
        ),
        drawn_floats(12),
    ),
    "positions": Model(
        lambda: nn.Sequential(
            nn.Embedding(CLASSES, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.GELU(),
            nn.Linear(32, 16),
            nn.Linear(16, CLASSES),
        ),
        tokens,
    ),
    "convolutions": Model(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32, CLASSES),
        ),
        drawn_floats(3, 6, 6),
    ),
    "attention": Model(
        lambda: nn.Sequential(
            nn.Linear(6, 8), Attention(8, 2), nn.RMSNorm(8), nn.Linear(8, CLASSES)
        ),
        drawn_floats(POSITIONS, 6),
    ),
    "generic": Model(
        lambda: nn.Sequential(nn.Linear(6, 8), Scale(8), nn.Tanh(), nn.Linear(8, CLASSES)),
        drawn_floats(POSITIONS, 6),
        opacus=False,  # two trainable uses of functorch that its ghost mode warns about
    ),
    "tied_head": Model(TiedHead, tokens, opacus=False),  # it refuses tied parameters
}


class Criterion(nn.Module):
    """Cross entropy of all positions of a sample, added up; in fp32, as it is done in practice."""

    def __init__(self, reduction: str):
        super().__init__()
        self.reduction = reduction

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        flat = F.cross_entropy(scores.flatten(0, -2).float(), target.flatten(), reduction="none")
        rows = flat.view(scores.shape[0], -1).sum(1)
        return {"none": lambda x: x, "sum": Tensor.sum, "mean": Tensor.mean}[self.reduction](rows)


@dataclass
class Released:
    total: dict[str, Tensor]  # float64
    norms: Tensor

    def change(self, other: Released) -> float:
        return math.hypot(*((self.total[n] - other.total[n]).norm().item() for n in self.total))

    def norm(self) -> float:
        return math.hypot(*(grad.norm().item() for grad in self.total.values()))


class Release:
    """Backward passes of one model by flash clipping, or by Opacus' ghost clipping."""

    def __init__(
        self,
        model: nn.Module,
        *,
        reduction: str = "sum",
        autocast: bool = False,
        opacus: bool = False,
        **options: Any,
    ):
        self.model = copy.deepcopy(model)
        cls = GradSampleModuleFastGradientClipping if opacus else GradSampleModuleFlashClipping
        self.module = cls(self.model, loss_reduction=reduction, strict=False, **options)
        self.autocast = autocast
        self.criterion: Any = Criterion(reduction)
        if opacus:
            self.criterion = DPLossFastGradientClipping(
                self.module,
                SimpleNamespace(loss_reduction=reduction, zero_grad=self.model.zero_grad),
                self.criterion,
                reduction,
            )

    def __call__(self, x: Tensor, y: Tensor, bound: Any = 1.0) -> Released:
        self.module.max_grad_norm = bound
        self.model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                loss = self.criterion(self.module(x), y)
            loss.backward()
        total = {n: p.grad.double() for n, p in self.model.named_parameters()}
        return Released(total, self.module.get_norm_sample())


def sample_batch(name: str, size: int, seed: int, scale: float) -> tuple[nn.Module, Tensor, Tensor]:
    """A fresh model and a batch of ``size`` samples of different sizes around ``scale``."""
    torch.manual_seed(seed)
    model, generator = MODELS[name].make(), torch.Generator().manual_seed(seed + 1)
    x = MODELS[name].inputs(size, generator)
    if x.is_floating_point():
        spread = torch.exp(torch.randn(size, generator=generator))
        x = x * scale * spread.view(-1, *[1] * (x.dim() - 1))
    shape = (size,) if name in ("mlp", "convolutions") else (size, POSITIONS)
    return model, x, torch.randint(0, CLASSES, shape, generator=generator)


def without(b: int, x: Tensor) -> Tensor:
    return torch.cat([x[:b], x[b + 1 :]])


# -- fp32: the guarantee --------------------------------------------------------------------------


@pytest.mark.timeout(300 if PROFILE == "default" else 7200)
@pytest.mark.parametrize("name", MODELS)
def test_sensitivity_fp32(name: str) -> None:
    """At most ``C (1 + 1e-5)``, for any batch and any sample of it."""

    @profile(8)
    @given(
        size=st.integers(1, 6),
        seed=st.integers(0, 10**6),
        scale=st.sampled_from([1e-2, 1.0, 30.0]),
        bound=st.sampled_from([1e-4, 0.3, 1.0, 3.0]),  # in units of the median norm
        mode=st.sampled_from(["one_pass", "two_pass"]),
        reduction=st.sampled_from(["mean", "sum"]),
        clipping=st.sampled_from(["flat", "flat", "automatic"]),
    )
    def holds(
        size: int, seed: int, scale: float, bound: float, mode: str, reduction: str, clipping: str
    ) -> None:
        model, x, y = sample_batch(name, size, seed, scale)
        release = Release(model, mode=mode, reduction=reduction, clipping=clipping)
        C = bound * release(x, y).norms.median().item()
        all_of_it = release(x, y, C)
        for b in range(size):
            if size == 1:
                change = all_of_it.norm()
            else:
                rest = release(without(b, x), without(b, y), C)
                change = all_of_it.change(rest)
            assert change <= C * (1 + SLACK), f"sample {b}: {change / C:.8f} C"

    holds()


@pytest.mark.parametrize("name", MODELS)
def test_sensitivity_per_layer(name: str) -> None:
    """Every parameter's sum changes by its own bound at most."""

    @profile(4)
    @given(size=st.integers(2, 5), seed=st.integers(0, 10**6))
    def holds(size: int, seed: int) -> None:
        model, x, y = sample_batch(name, size, seed, 1.0)
        named = [n for n, p in model.named_parameters()]
        generator = torch.Generator().manual_seed(seed)
        bounds = (torch.rand(len(named), generator=generator) * 0.5 + 1e-3).tolist()
        release = Release(model, clipping="per_layer", max_grad_norm=bounds)
        all_of_it = release(x, y, bounds)
        for b in range(size):
            rest = release(without(b, x), without(b, y), bounds)
            for param_name, C in zip(named, bounds, strict=True):
                change = (all_of_it.total[param_name] - rest.total[param_name]).norm().item()
                assert change <= C * (1 + SLACK), f"{param_name}, sample {b}: {change / C:.8f} C"

    holds()


# -- bf16 and fp16: measured, beside Opacus' ghost clipping ---------------------------------------

PRECISIONS = {
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
    "bf16_autocast": (torch.float32, True),
}

#: Half the distance between 1 and the next number: the relative error of one rounding.
UNIT = {"bf16": 2**-9, "fp16": 2**-12, "bf16_autocast": 2**-9}

#: Of the worst case, in which every entry is off by a whole ``u`` in the same direction.
ALLOWED = 0.5


@dataclass
class Worst:
    """The largest change seen, in units of C, and what of it rounding of the sum explains."""

    change: float = 0.0
    excess: float = -math.inf  # (change - C) / (unit * (|S| + |S'|))


def measure(name: str, precision: str, opacus: bool, batches: int) -> Worst:
    dtype, autocast = PRECISIONS[precision]
    worst = Worst()
    for seed in range(batches):
        scale, part = [(1.0, 0.3), (1.0, 1.0), (30.0, 0.3), (1.0, 0.01)][seed % 4]
        model, x, y = sample_batch(name, 6, seed, scale)
        model = model.to(dtype)
        x = x.to(dtype) if x.is_floating_point() else x
        ours = release = Release(model, autocast=autocast)
        if opacus:
            release = Release(model, autocast=autocast, opacus=True)
        C = part * ours(x, y).norms.median().item()  # one bound for both methods
        all_of_it = release(x, y, C)
        for b in range(len(x)):
            rest = release(without(b, x), without(b, y), C)
            change = all_of_it.change(rest)
            rounding = UNIT[precision] * (all_of_it.norm() + rest.norm())
            worst.change = max(worst.change, change / C)
            worst.excess = max(worst.excess, (change - C) / rounding)
    return worst


@pytest.mark.every_pair
@pytest.mark.parametrize(
    ("batches", "beside"), [(2, False), pytest.param(8, True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_sensitivity_half(
    name: str,
    precision: str,
    batches: int,
    beside: bool,
    record_property: Callable[[str, object], None],
) -> None:
    """Above ``C`` by less than half of ``u (|S| + |S'|)``, the most that rounding the sums can do.

    ``u`` is the relative error of one rounding to the gradient's dtype (under autocast the dtype
    it is computed in). With ``-m slow``, Opacus' ghost clipping on the same batches is printed
    beside it (``-rP``).
    """
    ours = measure(name, precision, opacus=False, batches=batches)
    record_property("sensitivity", ours.change)
    line = f"{name}, {precision}: {ours.change:.5f} C, {ours.excess:+.2f} u (|S| + |S'|)"
    if beside and MODELS[name].opacus:
        theirs = measure(name, precision, opacus=True, batches=batches)
        record_property("sensitivity_opacus_ghost", theirs.change)
        line += f"; Opacus ghost {theirs.change:.5f} C, {theirs.excess:+.2f} u (|S| + |S'|)"
    print(line)
    assert ours.excess <= ALLOWED, line


@pytest.mark.parametrize("loss_scale", [1e3, 1e4, 1e5])
def test_small_coefficients_in_fp16(loss_scale: float) -> None:
    """Large gradients (a loss scale) and a small bound; all of the result is normal in fp16."""
    torch.manual_seed(0)
    A = torch.randn(8, 8, 32).half()
    G = (torch.randn(8, 8, 64) * loss_scale).clamp(-6e4, 6e4).half()
    C = 0.05
    (sq,), _ = linear_sqnorms([(A, [G])])[0]
    coef = (C / sq.sqrt()).clamp(max=1)
    for b in range(len(A)):
        (alone,) = clipped_sums(A[b : b + 1], [G[b : b + 1]], coef[b : b + 1])
        assert abs(alone.double().norm().item() / C - 1) <= 1e-5, f"sample {b}"
