"""``with samples(index, count=B)``: layers that read rows of any samples, in any order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import GradSampleModuleFlashClipping, samples
from tests.support.autograd import check_by_autograd, float64s, mean_squares, squares
from tests.support.errors import raises
from tests.support.wrapping import MODES

pytestmark = pytest.mark.without_gate


class Experts(nn.Module):
    """A list of experts; each gets the tokens that chose it."""

    def __init__(self, make: Any = None, experts: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        make = make or (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)))
        self.before, self.router = nn.Linear(6, 6), nn.Linear(6, experts)
        self.experts = nn.ModuleList(make() for _ in range(experts))
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.before(x))
        B, T, d = hidden.shape
        weights, chosen = self.router(hidden).flatten(0, 1).softmax(-1).topk(2, -1)
        tokens = hidden.flatten(0, 1)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            token, place = torch.where(chosen == e)
            y = self.run(expert, tokens[token], token // T, B)
            out = out.index_add(0, token, y * weights[token, place, None])
        return self.last(hidden + out.view(B, T, d))

    def run(self, expert: nn.Module, x: Tensor, index: Tensor, B: int) -> Tensor:
        with samples(index, count=B):
            y: Tensor = expert(x)
        return y


@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 7), (4, 1), (3, 5), (6, 2)])
def test_a_list_of_experts(B: int, T: int) -> None:
    check_by_autograd(Experts().double(), float64s(B, T, 6), squares)


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str) -> None:
    check_by_autograd(Experts().double(), float64s(3, 5, 6), squares, mode=mode)


def test_experts_without_rows() -> None:
    """As many as there are, but two are chosen by each token: most get none."""
    check_by_autograd(Experts(experts=20).double(), float64s(2, 2, 6), squares)


def test_checkpointed_experts() -> None:
    class Checkpointed(Experts):
        def run(self, expert: nn.Module, x: Tensor, index: Tensor, B: int) -> Tensor:
            run = super().run
            y: Tensor = checkpoint(run, expert, x, index, B, use_reentrant=False)
            return y

    check_by_autograd(Checkpointed().double(), float64s(3, 5, 6), squares)


class Outside(nn.Module):
    """A checkpoint inside of ``samples``: the layer runs again outside of it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.layer, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 6), reentrant

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).flatten(0, 1)
        with samples(right(x).flip(0), count=len(x)):
            y: Tensor = checkpoint(self.layer, rows.flip(0), use_reentrant=self.reentrant)
        return y.flip(0).view_as(x)


@pytest.mark.parametrize("T", [1, 4])
def test_checkpointed_inside_of_samples(T: int) -> None:
    check_by_autograd(Outside(reentrant=False).double(), float64s(3, T, 6), squares)


@pytest.mark.parametrize("T", [1, 4])
def test_reentrant_checkpoint_inside_of_samples(T: int) -> None:
    """With as many rows as samples nothing else would be noticed."""
    flash = GradSampleModuleFlashClipping(Outside(reentrant=True))
    loss = squares(flash, (torch.randn(3, T, 6),))
    with raises("FC262", match=r"layer \(Linear\)"):
        loss.backward()


def test_index_may_be_changed_afterwards() -> None:
    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            index = right(x)
            rows = torch.tanh(self.first(x)).flatten(0, 1)
            with samples(index, count=len(x)):
                y: Tensor = self.layer(rows)
            index.zero_()
            return y.view(len(x), -1)

    check_by_autograd(Reusing().double(), float64s(3, 5, 6), squares)


def test_one_expert_for_all() -> None:
    """A parameter with several uses, each with rows of its own."""

    class Shared(Experts):
        def run(self, expert: nn.Module, x: Tensor, index: Tensor, B: int) -> Tensor:
            return super().run(self.experts[0], x, index, B)

    check_by_autograd(Shared().double(), float64s(3, 5, 6), squares)


def test_tables_that_are_read_twice() -> None:
    """Each time by rows of its own, of which some are of none."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(7, 6, padding_idx=2), nn.LayerNorm(6)
            self.head = nn.Linear(6, 3)

        def forward(self, ids: Tensor) -> Tensor:
            B, T = ids.shape
            y = self.head(self.norm(self.table(ids))).mean(1)
            index = torch.arange(B * T) // T
            place = torch.arange(B * T) % T
            for keep in (place % 3 > 0, place % 2 > 0):
                with samples(torch.where(keep, index, -1), count=B):
                    rows = self.norm(self.table(ids.flatten()))
                kept = (rows * keep[:, None]).view(B, T, -1).sum(1)
                y = y + kept[:, :3]
            return y

    ids = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(0))
    check_by_autograd(Tables().double(), (ids,), squares)


class AnyRows(nn.Module):
    """Layers of every kind on rows of samples in any order, some of none."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.before, self.layer, self.width = nn.Linear(6, width), layer, width

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        index = torch.arange(B * T) // T
        order = torch.argsort(torch.sin(torch.arange(B * T) * 1.7))
        index = torch.where(torch.arange(B * T) % T == 2, -1, index)[order]
        y = self.rows(torch.tanh(self.before(x)).flatten(0, 1)[order], index, B)
        y = y.flatten(1) * (index >= 0)[:, None]  # of none: nothing comes of it
        return torch.zeros(B, y.shape[1], dtype=y.dtype).index_add(0, index.clamp(min=0), y)

    def rows(self, x: Tensor, index: Tensor, B: int) -> Tensor:
        with samples(index, count=B):
            y: Tensor = self.layer(x.unflatten(1, (-1, self.width // 3)))
        return y


LAYERS = {
    "linear": lambda: nn.Linear(4, 3),
    "bias only": lambda: nn.Linear(4, 3),
    "layer norm": lambda: nn.LayerNorm(4),
    "convolution": lambda: nn.Conv1d(3, 2, 3),
    "group norm": lambda: nn.GroupNorm(3, 3),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_every_kind(name: str) -> None:
    model = AnyRows(LAYERS[name](), 12).double()
    if name == "bias only":
        model.layer.weight.requires_grad_(False)
    check_by_autograd(model, float64s(3, 4, 6), squares)


def test_embeddings() -> None:
    class Ids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.last = nn.Embedding(9, 4, padding_idx=2), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            B, T = ids.shape
            order = torch.argsort(torch.sin(torch.arange(B * T) * 1.7))
            ids_N = ids.flatten()[order]
            index = (torch.arange(B * T) // T)[order].masked_fill(ids_N == 5, -1)
            with samples(index, count=B):
                rows = self.table(ids_N.unsqueeze(1))[:, 0] * (index >= 0)[:, None]
            mixed = torch.zeros(B * T, 4, dtype=rows.dtype).index_copy(0, order, rows)
            return self.last(torch.tanh(mixed.view(B, T, 4)))

    check_by_autograd(Ids().double(), (torch.randint(9, (4, 6)),), squares)


def test_all_rows_of_one_sample() -> None:
    """The others add nothing, and have norms of 0 there."""

    class OfOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            with samples(torch.zeros(x.shape[1], dtype=torch.long), count=len(x)):
                return self.layer(x[0])

    x = torch.randn(3, 5, 6)
    flash = GradSampleModuleFlashClipping(OfOne(), loss_reduction="sum")
    flash(x).square().sum().backward()
    norms = flash.get_norm_sample()
    assert norms[0] > 0
    assert norms[1:].tolist() == [0, 0]


def test_not_wrapped_it_does_nothing() -> None:
    model = Experts().double()
    plain = copy.deepcopy(model)
    batch = float64s(3, 5, 6)
    expected = plain(*batch)
    assert torch.equal(model(*batch), expected)


# -- what is refused -------------------------------------------------------------------------------


class Declared(nn.Module):
    def __init__(self, index: Any, count: Any = None, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.index, self.count = index, count
        self.first, self.layer = nn.Linear(6, 6), layer or nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).flatten(0, 1)
        with samples(self.index(x), count=len(x) if self.count is None else self.count):
            return self.layer(rows).view(len(x), -1)


def right(x: Tensor) -> Tensor:
    return torch.arange(len(x)).repeat_interleave(x.shape[1])


@pytest.mark.parametrize(
    ("index", "count", "words"),
    [
        (lambda x: right(x) + 1, None, r"outside of -1 to 2"),
        (lambda x: right(x) - 2, None, r"outside of -1 to 2"),
        (lambda x: right(x)[1:], None, r"layer \(Linear\).* index has 14 entries"),
        (lambda x: right(x).float(), None, r"expected one integer for each row"),
        (lambda x: right(x).view(3, 5), None, r"expected one integer for each row"),
        (lambda x: [0] * 15, None, r"found list"),
        (right, 7, r"layer \(Linear\).*a batch of 3 samples"),
        (right, 3.0, r"count=3.0"),
        (lambda x: right(x).to("meta"), None, r"meta"),
    ],
)
def test_wrong_maps(index: Any, count: Any, words: str) -> None:
    flash = GradSampleModuleFlashClipping(Declared(index, count))
    with raises("FC260", match=words):
        flash(torch.randn(3, 5, 6))


def test_layers_without_a_rule() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    flash = GradSampleModuleFlashClipping(Declared(right, layer=Scale()))
    with raises("FC264", match=r"layer \(Scale\)"):
        flash(torch.randn(3, 5, 6))


def test_time_first() -> None:
    flash = GradSampleModuleFlashClipping(Declared(right), batch_first=False)
    with raises("FC263"):
        mean_squares(flash(torch.randn(5, 3, 6)))


def test_compiled() -> None:
    torch._dynamo.reset()
    flash = GradSampleModuleFlashClipping(Declared(right))
    flash.compile(backend="eager", fullgraph=True)
    with raises("FC261", Exception):
        squares(flash, (torch.randn(3, 5, 6),)).backward()
    torch._dynamo.reset()
