"""One sample that is not finite contributes nothing and harms no other sample.

A batch with one poisoned sample is compared with the same batch without it: norms of the others,
coefficients, and the clipped sum.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import FlashPrivacyEngine, GradSampleModuleFlashClipping
from tests.support.errors import warns
from tests.support.models import Attention, Mixed, Scale, Tokens, floats, ids
from tests.support.oracle import assert_close
from tests.support.poison import (
    BAD,
    BATCH,
    OTHERS,
    RUNS,
    TOLERANCE,
    Stage,
    check_poisoned,
    losses,
    take,
)
from tests.support.sums import norm_of


class Staged(nn.Module):
    """Two halves of a model with a stage between them and one at the end."""

    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second
        self.middle, self.end = Stage(), Stage()

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.end(self.second(self.middle(self.first(*inputs))))


@dataclass(frozen=True)
class Case:
    first: Callable[[], nn.Module]
    second: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]


class Images(nn.Module):
    """The embedding and the convolution of the mixed model, as one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        return torch.cat([self.norm(self.conv(image)).flatten(2).mT, self.embed(tokens)], dim=1)


# One case for each way to compute a norm: rank one, gram, outer, outer that stores.
CASES = {
    "linear_rank_one": Case(
        lambda: nn.Linear(6, 8), lambda: nn.Sequential(nn.SiLU(), nn.Linear(8, 3)), floats(BATCH, 6)
    ),
    "linear_gram": Case(
        lambda: nn.Linear(12, 12),
        lambda: nn.Sequential(nn.SiLU(), nn.Linear(12, 12)),
        floats(BATCH, 2, 12),
    ),
    "linear_outer": Case(
        lambda: nn.Linear(6, 8),
        lambda: nn.Sequential(nn.SiLU(), nn.Linear(8, 6)),
        floats(BATCH, 6, 6),
    ),
    "linear_stored": Case(
        lambda: nn.Linear(4, 6),
        lambda: nn.Sequential(nn.SiLU(), nn.Linear(6, 4)),
        floats(BATCH, 40, 4),
    ),
    "conv": Case(
        lambda: nn.Conv2d(3, 4, 3, padding=1, stride=2),
        lambda: nn.Sequential(nn.SiLU(), nn.Conv2d(4, 4, 3, groups=2, padding=1)),
        floats(BATCH, 3, 6, 6),
    ),
    "embedding": Case(
        lambda: nn.Embedding(9, 6, padding_idx=0),
        lambda: nn.Sequential(nn.SiLU(), nn.Linear(6, 3)),
        ids(BATCH, 5, vocab=9),
    ),
    "layer_norm": Case(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)),
        lambda: nn.LayerNorm(6),
        floats(BATCH, 3, 4),
    ),
    "rms_norm": Case(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6)),
        lambda: nn.RMSNorm(6),
        floats(BATCH, 3, 4),
    ),
    "group_norm": Case(
        lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.GroupNorm(2, 4)),
        lambda: nn.GroupNorm(2, 4),
        floats(BATCH, 3, 5),
    ),
    "generic": Case(
        lambda: Scale(5), lambda: nn.Sequential(nn.SiLU(), Scale(5)), floats(BATCH, 3, 5)
    ),
    "parameter_proxies": Case(lambda: Tokens(6, 4), nn.Identity, floats(BATCH, 4, 3)),
    "attention": Case(lambda: nn.Linear(4, 8), lambda: Attention(8, 2), floats(BATCH, 4, 4)),
    "mixed": Case(
        Images,
        lambda: Mixed().blocks[0],
        lambda: (torch.randint(0, 11, (BATCH, 4)), torch.randn(BATCH, 3, 4, 4)),
    ),
}
#: Where the sample is not finite, and what is there instead.
POISONS = [
    ("input", math.nan),
    ("activation", math.inf),
    ("gradient", math.inf),
    ("gradient", math.nan),
    ("middle_gradient", math.inf),
]


def poison(model: Staged, batch: tuple[Tensor, ...], where: str, value: float) -> None:
    """Make sample ``BAD`` not finite, in place."""
    if where == "input":
        floating = [x for x in batch if x.is_floating_point()]
        if floating:
            floating[-1][BAD].view(-1)[1] = value
        else:  # an embedding: the row that only this sample reads
            (tokens,) = batch
            tokens[tokens == 8] = 1
            tokens[BAD, 1] = 8
            with torch.no_grad():
                model.first.weight[8, 1] = value
    elif where == "activation":
        model.middle.activation = (BAD, value)
    elif where == "gradient":
        model.end.gradient = (BAD, value)
    else:
        model.middle.gradient = (BAD, value)


def setting(name: str, dtype: torch.dtype) -> tuple[Staged, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    case = CASES[name]
    model = Staged(case.first(), case.second()).to(dtype)
    batch = case.batch()
    return model, tuple(x.to(dtype) if x.is_floating_point() else x for x in batch)


WAYS = [("one_pass", "mean"), ("two_pass", "sum")]
#: Every two of place and value, dtype, way to run and case meet; all of a case are slow.
GRID = [
    pytest.param(
        name,
        where,
        value,
        dtype,
        *WAYS[way],
        id=f"{name}-{where}-{value}-{str(dtype)[6:]}-{WAYS[way][0]}",
        marks=[pytest.mark.slow] * ((place + k) % 6 != 2 * turn + way),
    )
    for place, name in enumerate(CASES)
    for turn, dtype in enumerate(TOLERANCE)
    for k, (where, value) in enumerate(POISONS)
    for way in range(2)
]


@pytest.mark.parametrize(("name", "where", "value", "dtype", "mode", "reduction"), GRID)
def test_poisoned_sample_contributes_nothing(
    name: str, where: str, value: float, dtype: torch.dtype, reduction: str, mode: str
) -> None:
    """The result equals that of the batch without the sample."""
    model, batch = setting(name, dtype)
    poison(model, batch, where, value)
    clean = copy.deepcopy(model)
    for stage in (clean.middle, clean.end):
        stage.activation = stage.gradient = None
    check_poisoned(model, batch, reduction, mode, TOLERANCE[dtype], clean)


class Branch(nn.Module):
    """Two layers side by side; the gradient of one of them can be poisoned alone."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.stage = nn.Linear(4, 3), nn.Linear(4, 3), Stage()

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.stage(self.right(x))


@RUNS
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_layer_not_finite_alone_is_left_out(value: float, mode: str, reduction: str) -> None:
    """The sample's finite gradients in the other layers are left out as well."""
    torch.manual_seed(0)
    model = Branch()
    batch = (torch.randn(BATCH, 3, 4),)
    clean = copy.deepcopy(model)
    model.stage.gradient = (BAD, value)
    found = check_poisoned(model, batch, reduction, mode, clean=clean)
    assert torch.isfinite(norm_of(found, model.left.weight)).all()


class TiedHead(nn.Module):
    """A table that is read and applied, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(9, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.stage = Stage()

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.silu(self.hidden(self.embed(tokens)))
        return self.head(self.stage(self.hidden(x)))


@RUNS
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["activation", "gradient"])
def test_poisoned_tied_head_is_left_out(
    where: str, value: float, mode: str, reduction: str
) -> None:
    torch.manual_seed(0)
    model = TiedHead()
    batch = (torch.randint(0, 9, (BATCH, 5)),)
    clean = copy.deepcopy(model)
    setattr(model.stage, where, (BAD, value))
    check_poisoned(model, batch, reduction, mode, clean=clean)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_poisoned_sample_of_a_checkpointed_model_is_left_out(checkpointing: str, mode: str) -> None:
    torch.manual_seed(0)
    model = Mixed(checkpointing=checkpointing)
    tokens, image = torch.randint(0, 11, (BATCH, 4)), torch.randn(BATCH, 3, 4, 4)
    image[BAD, 0, 0, 0] = math.nan
    check_poisoned(model, (tokens, image), "mean", mode)


@RUNS
def test_whole_batch_is_poisoned(mode: str, reduction: str) -> None:
    """All coefficients are 0 and the sum is zero, so that the step adds only noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    x = torch.full((BATCH, 4), math.nan)
    with warns("FC555"):
        flash = take(model, (x,), reduction, mode=mode)
    assert not flash.get_clipping_coef().any()
    for name, param in model.named_parameters():
        assert param.grad is not None and not param.grad.any(), name


@RUNS
def test_poisoned_samples_warn_once(mode: str, reduction: str) -> None:
    """One warning for the life of a wrapped model, and none for finite batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    flash = GradSampleModuleFlashClipping(model, loss_reduction=reduction, mode=mode)

    def step(bad: bool) -> list[str]:
        x = torch.randn(BATCH, 4)
        if bad:
            x[BAD] = math.inf
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows = losses(flash, (x,))
            (rows.mean() if reduction == "mean" else rows.sum()).backward()
        return [str(w.message) for w in caught if "not finite" in str(w.message)]

    assert [len(step(bad)) for bad in (False, True, True, False, True)] == [0, 1, 0, 0, 0]


@RUNS
@pytest.mark.parametrize("clipping", ["per_layer", "automatic"])
def test_poisoned_sample_is_left_out_by_any_clip(clipping: str, mode: str, reduction: str) -> None:
    """Coefficients are never NaN, and the sum is finite and without the sample."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.LayerNorm(6), nn.Linear(6, 3))
    x = torch.randn(BATCH, 4)
    clean = copy.deepcopy(model)
    rest = (x[OTHERS],)
    x[BAD, 0] = math.nan
    bound: Any = [0.5] * 6 if clipping == "per_layer" else 0.5
    expected = take(clean, rest, reduction, mode=mode, clipping=clipping, max_grad_norm=bound)
    with warns("FC555"):
        found = take(model, (x,), reduction, mode=mode, clipping=clipping, max_grad_norm=bound)
    coef = found.get_clipping_coef()
    assert torch.isfinite(coef).all() and (coef >= 0).all()
    if clipping == "per_layer":
        assert (coef <= 1).all()
    assert not coef[..., BAD].any()
    assert_close(coef[..., OTHERS], expected.get_clipping_coef(), 1e-5, "coefficients")
    for name, param in model.named_parameters():
        assert_close(param.grad, clean.get_parameter(name).grad, 1e-5, name)


def test_step_of_the_engine() -> None:
    """A whole training run with a poisoned sample in it leaves finite parameters."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.randint(0, 3, (12,))
    x[5, 1] = math.inf
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 3))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6)
    flash, optimizer, criterion, loader = FlashPrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    seen = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            for xs, ys in loader:
                optimizer.zero_grad()
                criterion(flash(xs), ys).backward()
                seen += int(torch.isinf(xs).any())
                optimizer.step()
    assert seen > 0
    assert all(torch.isfinite(p).all() for p in model.parameters())
