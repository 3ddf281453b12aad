"""Layers that see parts of samples as rows: refused by name, or declared and then exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import FlashPrivacyEngine, GradSampleModuleFlashClipping
from flash_clipping.capture.proxies import operation
from flash_clipping.factors import EmbeddingBagGrad
from tests.support.autograd import TOLERANCE, check_truth, truth_of_one_forward
from tests.support.cases import bound_between, check_case, make_case, step_case
from tests.support.errors import raises
from tests.support.models import Attention, Case, floats
from tests.support.oracle import per_sample_truth

pytestmark = pytest.mark.without_gate


class Windowed(nn.Module):
    """Attention within windows of four positions, folded into the batch as Swin does it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.attention = Attention(8, 2)
        self.norm = nn.LayerNorm(8)
        self.bias = nn.Parameter(torch.randn(4, 8) * 0.1)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        windows = x.unflatten(1, (x.shape[1] // 4, 4)).flatten(0, 1)
        windows = windows + self.attention(self.norm(windows))
        return self.head(windows.unflatten(0, (len(x), x.shape[1] // 4)).flatten(1, 2))


CASE = Case(Windowed, floats(3, 12, 3))
FOLDED = ["attention*", "norm"]


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_declared_windows_in_an_empty_batch(mode: str) -> None:
    model, _ = make_case(CASE, torch.float64)
    model.bias.requires_grad_(False)
    module = GradSampleModuleFlashClipping(model, folded_modules=FOLDED, mode=mode)
    module.expect_samples(0)
    module(torch.full((1, 12, 3), torch.inf, dtype=torch.float64)).sum().backward()
    assert module.get_norm_sample().shape == (0,)
    assert all(not p.grad.any() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("samples", [0, 2])
def test_per_sample_tables_of_bags(samples: int) -> None:
    bags = torch.arange(samples).repeat_interleave(2)
    ids, weights = torch.tensor([1, 1, 3, 0])[: len(bags)], torch.ones(len(bags))
    G = torch.randn(samples, 3)
    dense = EmbeddingBagGrad(bags, ids, weights, G, 5).dense()
    assert dense.shape == (samples, 5, 3)
    if samples:
        truth = torch.zeros(2, 5, 3)
        truth[0, 1], truth[1, 3], truth[1, 0] = 2 * G[0], G[1], G[1]
        assert torch.equal(dense, truth)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_declared_windows_are_exact(mode: str) -> None:
    model, batch = make_case(CASE, torch.float64)
    model.bias.requires_grad_(False)
    truth = per_sample_truth(model, batch, CASE.loss)
    bound = bound_between(truth)
    module = GradSampleModuleFlashClipping(
        model,
        max_grad_norm=bound,
        mode=mode,
        folded_modules=FOLDED,
    )
    step_case(module, CASE, batch, "mean")
    check_case(module, truth, bound, 1e-10)


def test_wrong_declarations() -> None:
    model, batch = make_case(CASE, torch.float64)
    with raises("FC174", ValueError, match="'window'"):
        GradSampleModuleFlashClipping(model, folded_modules=["window"])


def test_through_the_engine() -> None:
    model, batch = make_case(CASE, torch.float32)
    dataset = torch.utils.data.TensorDataset(batch[0], torch.zeros(3, dtype=torch.long))
    module, *_ = FlashPrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(dataset, batch_size=3),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        folded_modules=FOLDED,
    )
    step_case(module, CASE, batch, "mean")
    assert module.get_norm_sample().shape == (3,)


class BiasedAttention(nn.Module):
    """Attention with a bare table of biases, to which a mask per window may be added first."""

    def __init__(self, width: int, windows: str):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn(7, 2))
        self.windows = windows

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k, v = heads
        places = torch.arange(4)
        bias = self.table[places[:, None] - places + 3].permute(2, 0, 1)[None]
        scores = q @ k.mT
        if self.windows == "all":  # one mask per row, as transformers' Swin has it
            scores = scores + (bias + mask.repeat(len(x) // len(mask), 1, 1)[:, None])
        else:  # one mask per window of a sample
            bias = bias + mask[:, None]
            scores = (scores.unflatten(0, (-1, len(mask))) + bias).flatten(0, 1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class MaskedWindows(nn.Module):
    def __init__(self, windows: str) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(3, 8), BiasedAttention(8, windows)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embed(x).unflatten(1, (-1, 4)).flatten(0, 1)
        mask = torch.zeros(len(rows) // len(x), 4, 4, dtype=x.dtype)
        mask[-1, :2, 2:] = mask[-1, 2:, :2] = -3
        rows = rows + self.attention(rows, mask)
        return self.head(rows.unflatten(0, (len(x), -1)).flatten(1, 2))


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("windows", ["all", "own"])
@pytest.mark.parametrize("shape", [(3, 4, 3), (3, 12, 3), (3, 24, 3), (2, 8, 3)])
def test_mask_and_bare_biases_in_windows(shape: tuple[int, ...], windows: str, mode: str) -> None:
    """With fewer windows than samples, as many, and more."""
    case = Case(lambda: MaskedWindows(windows), floats(*shape))
    model, batch = make_case(case, torch.float64)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    module = GradSampleModuleFlashClipping(
        model, max_grad_norm=bound, mode=mode, folded_modules=["attention*"]
    )
    step_case(module, case, batch, "mean")
    check_case(module, truth, bound, 1e-10)


class BiasFromCoordinates(nn.Module):
    """Windows whose bias is computed by a network over a table of coordinates, as in Swin v2."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 2)
        self.attention = nn.ModuleDict({"mix": nn.Linear(8, 8), "bias": nn.Linear(1, 8)})
        self.register_buffer("table", torch.linspace(-1, 2, rows)[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embed(x).unflatten(1, (-1, 4)).flatten(0, 1)
        bias = self.attention["bias"](self.table.to(x.dtype)).mean(0)
        rows = torch.tanh(self.attention["mix"](rows) + bias)
        return self.head(rows.unflatten(0, (len(x), -1)).flatten(1, 2))


@pytest.mark.parametrize("batch_size", [2, 3])
@pytest.mark.parametrize("rows", [3, 6, 12])
def test_constants_in_a_folded_module(rows: int, batch_size: int) -> None:
    """However many rows they have: those of samples become fewer with the batch."""
    case = Case(lambda: BiasFromCoordinates(rows), floats(batch_size, 12, 3))
    model, batch = make_case(case, torch.float64)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    module = GradSampleModuleFlashClipping(
        model, max_grad_norm=bound, folded_modules=["attention*"], strict=False
    )
    step_case(module, case, batch, "mean")
    check_case(module, truth, bound, 1e-10)


class RepeatedPositions(nn.Module):
    """Heads folded into rows, and keys of positions that are repeated for every sample, as in
    DeBERTa."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.embed, self.head = heads, nn.Linear(3, 8), nn.Linear(8, 2)
        self.map, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 8))
        self.scale = nn.Parameter(torch.rand(8))
        self.change: Callable[[Tensor], Any] = lambda keys: None

    def rows(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.rows(self.map(self.embed(x)))
        keys = self.rows(torch.tanh(self.map(self.table * self.scale))[None]).repeat(len(x), 1, 1)
        self.change(keys)
        scores = torch.bmm(q, keys.transpose(-1, -2)).softmax(-1)
        out = (torch.bmm(scores, keys) + q).unflatten(0, (len(x), -1))
        return self.head(out.transpose(1, 2).flatten(2))


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_rows_that_are_repeated_for_every_sample(samples: int, heads: int, mode: str) -> None:
    """They go back as one sample's, all at once: by each row it was heads times as often, with
    gradients of every parameter for each."""
    case = Case(lambda: RepeatedPositions(heads), floats(samples, 4, 3))
    model, batch = make_case(case, torch.float64)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=bound, mode=mode, strict=False)
    for _ in range(2):
        module.zero_grad()
        with mock.patch.object(operation, "_through_rows", side_effect=AssertionError):
            step_case(module, case, batch, "mean")
        check_case(module, truth, bound, 1e-10)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "a row": lambda keys: keys[0].mul_(2),
    "a position of every row": lambda keys: keys.transpose(0, 1)[0].mul_(3),
    "all": lambda keys: keys.mul_(2),
    "all by another name": lambda keys: keys.mT.mul_(2),
}


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("samples", "heads"), [(1, 2), (2, 2), (3, 1), (3, 2)])
def test_repeated_rows_that_are_changed_in_place(
    samples: int, heads: int, change: str, mode: str
) -> None:
    """From some step on, which is not rehearsed: rows are then no longer what was repeated."""
    model, (x,) = make_case(
        Case(lambda: RepeatedPositions(heads), floats(samples, 4, 3)), torch.float64
    )
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, mode=mode, strict=False)
    flash(x).square().sum((1, 2)).mean().backward()
    plain = RepeatedPositions(heads).double()
    plain.load_state_dict(model.state_dict())
    plain.change = model.change = CHANGES[change]
    truth = truth_of_one_forward(plain(x).square().sum((1, 2)), plain)
    model.zero_grad()
    flash(x).square().sum((1, 2)).mean().backward()
    check_truth(flash, model, truth, 1.0, TOLERANCE)


@pytest.mark.parametrize("declared", [True, False])
def test_a_second_backward_through_one_forward(declared: bool) -> None:
    """Rows are still parts of its samples, and its sums those of the first."""
    model, (x,) = make_case(CASE, torch.float64)
    options = {"folded_modules": FOLDED} if declared else {}
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=0.1, **options)
    loss = flash(x).square().mean()
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    flash.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, first[name]), name


def test_a_second_backward_beside_calls_of_other_sizes() -> None:
    """Each layer's rows are of the call that it was made in, whatever else is alive."""
    model, (x,) = make_case(CASE, torch.float64)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=0.1, folded_modules=FOLDED)
    sums = []
    losses = [flash(x[:size]).square().mean() for size in (3, 2)]
    for loss in (*losses, *losses):
        flash.zero_grad()
        loss.backward(retain_graph=True)
        sums.append([p.grad.clone() for p in model.parameters()])
    for first, second in ((0, 2), (1, 3)):
        for a, b in zip(sums[first], sums[second], strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(sums[0][-1], sums[1][-1])
