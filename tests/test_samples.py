"""Who is a sample is shown by rehearsals: what merely has as many rows is exact or refused.

Norms and sums against one plain backward per sample, in float64.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import FlashClippingError, GradSampleModuleFlashClipping
from tests.oracle import assert_close
from tests.test_shared_parameters import (
    MODES,
    check,
    floats,
    mean_squares,
    squares,
    truth_by_autograd,
)


def change_of_sum(model: nn.Module, batches: list[tuple[Tensor, ...]], bound: float = 0.01) -> Any:
    """The most that one sample of the last batch adds to the released sum, in units of ``C``.

    The batches before it are steps of the same wrapped model. Each sample adds what the sum over
    all samples has less without it (measured by coefficients: the sum is linear in them).
    """
    truth = truth_by_autograd(copy.deepcopy(model), batches[-1], squares)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=bound)
    for batch in batches:
        flash.zero_grad(set_to_none=True)
        squares(flash, batch).backward()
    norms = flash.get_norm_sample()
    assert len(norms) == len(truth.norms)
    return float((truth.norms * flash.get_clipping_coef()).max() / bound)


# -- constants stay constants until they meet the samples ------------------------------------------


class OnConstants(nn.Module):
    """Computes something from parameters and constants alone, and adds it to the samples."""

    def __init__(self, how: str):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 4))
        self.emb = nn.Parameter(torch.randn(4))
        self.embed = nn.Embedding(9, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.grid = torch.randn(7, 4, dtype=torch.float64)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        T, self.grid = x.shape[1], self.grid.to(x.dtype)
        constant = {
            "row": lambda: self.mlp(self.emb[None])[0],
            "mean": lambda: self.mlp(self.emb[None]).mean(0),
            "vector": lambda: self.mlp(self.emb),
            "looked_up": lambda: self.embed(torch.arange(T)[None]),
            "looked_up_T": lambda: self.embed(torch.arange(T)),
            "looked_up_first": lambda: self.embed(torch.arange(T)[None])[0],
            "looked_up_scaled": lambda: 2 * self.embed(torch.arange(T)),
            "looked_up_BT": lambda: self.embed(torch.arange(T).expand(len(x), T)),
            "sum_of_tables": lambda: (
                self.embed(torch.arange(T)[None]) + self.embed(torch.arange(T))
            ),
            "through_mlp": lambda: self.mlp(self.embed(torch.arange(T)[None])),
            "buffer": lambda: self.mlp(self.grid[:T]),
            "mean_of_buffer": lambda: self.mlp(self.grid).mean(0),
            "convolution": lambda: self.conv(self.grid[:T].mT[None])[0].mT,
            "attention": lambda: self.attention(
                self.grid[None, :T], self.grid[None], self.grid[None]
            )[0][0],
        }[self.how]()
        if self.how == "looked_up":
            assert constant.shape == (1, T, 4)
        return self.last(torch.tanh(x + constant))


HOW = [
    "row",
    "mean",
    "vector",
    "looked_up",
    "looked_up_T",
    "looked_up_first",
    "looked_up_scaled",
    "looked_up_BT",
    "sum_of_tables",
    "through_mlp",
    "buffer",
    "mean_of_buffer",
    "convolution",
    "attention",
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(3, 5), (5, 5), (1, 5), (2, 2), (7, 5), (6, 3), (1, 1), (4, 1)])
@pytest.mark.parametrize("how", HOW)
def test_computed_from_constants_is_exact(how: str, shape: tuple[int, int], mode: str) -> None:
    model = OnConstants(how).double()
    if mode == "one_pass":
        check(model, floats(*shape, 4), squares)
    else:
        check(model, floats(*shape, 4), squares, mode=mode, steps=1)


@pytest.mark.parametrize("how", HOW)
def test_a_later_batch_has_the_size_of_a_constant(how: str) -> None:
    """Rehearsed on 3 samples of 5 positions; then every size is that of something else."""
    model = OnConstants(how).double()
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    for shape in [(3, 5), (5, 5), (1, 5), (7, 7), (7, 3), (1, 1), (2, 2)]:
        batch = floats(*shape, 4)
        truth = truth_by_autograd(OnConstants(how).double(), batch, squares)
        flash.zero_grad(set_to_none=True)
        squares(flash, batch).backward()
        assert_close(flash.get_norm_sample(), truth.norms, 1e-9, str(shape))


class Table(nn.Embedding):
    """Positions of its own, as Blenderbot's and BART's: a subclass, which no rule serves."""

    def forward(self, T: int) -> Tensor:
        return super().forward(torch.arange(T))


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 4))

    def forward(self, T: int) -> Tensor:
        return self.table[torch.arange(T)]


class AtPositions(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.positions = Table(9, 4) if kind == "embedding" else Indexed()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) + self.positions(x.shape[1])))


@pytest.mark.parametrize("kind", ["embedding", "indexed"])
def test_positions_are_never_samples(kind: str) -> None:
    """Proven at ``B != T``; then as many positions as samples. It was 11.15 C."""
    batches = [floats(3, 5, 4), floats(5, 5, 4)]
    found = change_of_sum(AtPositions(kind).double(), batches)
    assert found <= 1 + 1e-6
    flash = GradSampleModuleFlashClipping(AtPositions(kind).double())
    for (x,) in [*batches, floats(1, 5, 4), floats(2, 2, 4)]:
        truth = truth_by_autograd(AtPositions(kind).double(), (x,), squares)
        flash.zero_grad()
        squares(flash, (x,)).backward()
        assert_close(flash.get_norm_sample(), truth.norms, 1e-9)


def test_rows_of_a_table_cost_no_table_per_sample() -> None:
    """A position embedding is read as ``[1, T]`` and added: its factor is a lookup."""
    from flash_clipping.factors import Lookup
    from flash_clipping.finish.tape import Tape

    seen: list[Any] = []

    class Watched(Tape):
        def record(self, path: str, params: Any, factors: Any, readers: Any = None) -> None:
            seen.extend(factors)
            super().record(path, params, factors, readers)

    for kind in ("embedding", "looked_up", "looked_up_T", "looked_up_first", "looked_up_BT"):
        model = AtPositions(kind) if kind == "embedding" else OnConstants(kind)
        flash = GradSampleModuleFlashClipping(model)
        flash._session.tape_class = Watched
        squares(flash, (torch.randn(3, 5, 4),)).backward()
        assert sum(isinstance(factor, Lookup) for factor in seen) == 1, kind
        seen.clear()


class Queries(nn.Module):
    """Learned vectors, expanded over the batch, attend to the samples or are attended to."""

    def __init__(self, as_query: bool):
        super().__init__()
        torch.manual_seed(0)
        self.learned = nn.Parameter(torch.randn(3, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.as_query = as_query

    def forward(self, x: Tensor) -> Tensor:
        x, learned = torch.tanh(self.first(x)), self.learned.expand(len(x), 3, 4)
        q, k = (learned, x) if self.as_query else (x, learned)
        return self.last(self.attention(q, k, k, need_weights=False)[0])


@pytest.mark.parametrize("shape", [(5, 5), (3, 5), (4, 2)])
@pytest.mark.parametrize("as_query", [False, True])
def test_learned_vectors_expanded_over_the_batch(as_query: bool, shape: tuple[int, int]) -> None:
    check(Queries(as_query).double(), floats(*shape, 4), squares)


# -- rows that are no samples, or other samples ----------------------------------------------------


class Rows(nn.Module):
    """A layer that reads rows in some other way than one for each sample, in order."""

    def __init__(self, how: str):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mix, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        B, T = x.shape[:2]
        if self.how == "transposed":
            return self.last(torch.tanh(self.mix(x.transpose(0, 1)).transpose(0, 1)))
        if self.how == "flattened":
            return self.last(torch.tanh(self.mix(x.flatten(0, 1)).unflatten(0, (B, T))))
        if self.how == "sorted":
            order = x.sum((1, 2)).argsort()
            return self.last(torch.tanh(self.mix(x[order])[order.argsort()]))
        if self.how == "shuffled":
            order = torch.arange(B).flip(0)
            return self.last(torch.tanh(self.mix(x[order])[order]))
        if self.how == "routed":  # an expert for the tokens that like it
            flat = x.flatten(0, 1)
            chosen = (flat[:, 0] > flat[:, 0].median()).nonzero().squeeze(1)
            x = flat.index_add(0, chosen, self.mix(flat[chosen])).view(B, T, -1)
            return self.last(torch.tanh(x))
        if self.how == "exactly_B":  # the first token of all B sequences, but those of other ones
            flat = x.flatten(0, 1)
            chosen = flat[:, 0].topk(B).indices  # expert choice with capacity B
            x = flat.index_add(0, chosen, self.mix(flat[chosen])).view(B, T, -1)
            return self.last(torch.tanh(x))
        assert self.how == "mean"
        return self.last(torch.tanh(self.mix(x - x.mean(0))))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(5, 5), (4, 3), (2, 2), (6, 2)])
@pytest.mark.parametrize(
    "how", ["transposed", "flattened", "sorted", "shuffled", "routed", "exactly_B", "mean"]
)
def test_other_rows_are_refused(how: str, shape: tuple[int, int], mode: str) -> None:
    if how == "routed" and shape == (2, 2):
        pytest.skip("it chooses one token of each sample, in order")
    model = Rows(how).double()
    with pytest.raises(FlashClippingError, match=r"mix \(Linear\): what it reads has"):
        check(model, floats(*shape, 4), squares, mode=mode)


def test_all_layers_are_named_at_once() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Flatten(0, 1), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)
    )
    flash = GradSampleModuleFlashClipping(model)
    with pytest.raises(FlashClippingError) as error:
        flash(torch.randn(3, 5, 4))
    text = str(error.value)
    for path in ("2 (Linear)", "3 (LayerNorm)", "4 (Linear)"):
        assert f"{path}: what it reads has 15 rows for a batch of 3, and 10 for a batch" in text
    assert "0 (Linear)" not in text
    assert "folded_modules" in text and "freeze" in text


class Noisy(nn.Module):
    """Draws random numbers for everything, in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.first(x)), 0.5)
        x = x + torch.randn_like(x) + torch.rand(x.shape) * torch.randint(3, x.shape)
        x = torch.bernoulli(torch.sigmoid(x)) + x * torch.empty_like(x).uniform_()
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)
        return self.last(torch.tanh(self.mid(x)))


@pytest.mark.parametrize("mode", MODES)
def test_chance_is_not_refused(mode: str) -> None:
    flash = GradSampleModuleFlashClipping(Noisy(), mode=mode)
    before = torch.get_rng_state()
    for shape in ((4, 4), (5, 3), (1, 4)):
        squares(flash, (torch.randn(*shape, 4),)).backward()
        assert len(flash.get_norm_sample()) == shape[0]
        flash.zero_grad()
    assert not torch.equal(before, torch.get_rng_state())
    assert flash._session.evidence.proven == {
        "first (Linear)",
        "mid (Linear)",
        "last (Linear)",
    }


# -- bags of embeddings ----------------------------------------------------------------------------


class Bags(nn.Module):
    """``F`` bags of ids in every sample."""

    def __init__(self, F: int, flat: bool):
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.head = nn.EmbeddingBag(9, 4, mode="sum"), nn.Linear(4 * F, 3)
        self.F, self.flat = F, flat

    def forward(self, ids: Tensor) -> Tensor:
        rows = ids.unflatten(1, (self.F, -1)).flatten(0, 1)
        if self.flat:
            offsets = torch.arange(0, rows.numel(), rows.shape[1])
            x = self.bag(rows.flatten(), offsets)
        else:
            x = self.bag(rows)
        return self.head(x.unflatten(0, (len(ids), -1)).flatten(1))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("F", [2, 4])
def test_several_bags_in_a_sample(F: int, flat: bool, frozen: bool) -> None:
    """The change was F x C where the bag alone is trained."""
    model = Bags(F, flat).double()
    model.head.requires_grad_(not frozen)
    batch = (torch.randint(9, (3, 4 * F)),)
    with pytest.raises(FlashClippingError, match=rf"bag .* {3 * F} rows for a batch of 3"):
        check(copy.deepcopy(model), batch, squares)
    truth = truth_by_autograd(copy.deepcopy(model), batch, squares)
    flash = GradSampleModuleFlashClipping(model, folded_modules=["bag"], max_grad_norm=0.1)
    squares(flash, batch).backward()
    assert_close(flash.get_norm_sample(), truth.norms, 1e-9)


class Ragged(nn.Module):
    """Called with the ids of all samples end to end."""

    def __init__(self, last: bool, per_bag: int = 1):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(9, 4, mode="mean", include_last_offset=last)
        self.head = nn.Linear(4 * per_bag, 3)
        self.per_bag = per_bag

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(ids, offsets).unflatten(0, (-1, self.per_bag)).flatten(1))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("sizes", [(1, 3, 2), (2, 2), (1, 1, 1, 1), (5,)])
def test_bags_end_to_end_are_samples(sizes: tuple[int, ...], last: bool) -> None:
    ids = torch.randint(9, (sum(sizes),))
    ends = torch.tensor(sizes).cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), ends if last else ends[:-1]])
    model = Ragged(last).double()
    norms = []
    for part in ids.split(sizes):
        own = torch.tensor([0, len(part)] if last else [0])
        model.zero_grad()
        mean_squares(model(part, own)).backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    flash = GradSampleModuleFlashClipping(model)
    for _ in range(2):
        flash.zero_grad()
        mean_squares(flash(ids, offsets)).backward()
        assert_close(flash.get_norm_sample(), torch.stack(norms), 1e-9)


def test_bags_end_to_end_several_to_a_sample() -> None:
    model = Ragged(False, per_bag=2).double()
    with pytest.raises(FlashClippingError, match=r"head \(Linear\).* 2 rows"):
        mean_squares(
            GradSampleModuleFlashClipping(model)(torch.arange(8), torch.tensor([0, 2, 4, 6]))
        ).backward()


# -- where the call begins -------------------------------------------------------------------------


class Training(nn.Module):
    """A training step calls a part of it, as Lightning's do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def training_step(self, x: Tensor) -> Tensor:
        return mean_squares(self.net(x.transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize("after_a_call", [False, True])
def test_part_of_a_model_is_refused(after_a_call: bool) -> None:
    """A root whose forward is never called: nothing knew how many samples there are."""
    model = Training()
    model.forward = lambda x: model.net(x)  # type: ignore[method-assign]
    flash = GradSampleModuleFlashClipping(model)
    kept = flash(torch.randn(5, 5, 4)) if after_a_call else None
    with pytest.raises(FlashClippingError, match=r"net.0 \(Linear\).*wrapped model itself"):
        model.training_step(torch.randn(5, 5, 4))
    with torch.no_grad():
        model.training_step(torch.randn(5, 5, 4))
    mean_squares(flash(torch.randn(5, 5, 4))).backward()
    assert len(flash.get_norm_sample()) == 5
    del kept


# -- what the loader drew --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 16), (16,)])
def test_packed_inputs_are_refused(shape: tuple[int, ...]) -> None:
    """4 sequences of 4 tokens in one row (one sample), or all tokens (16 samples)."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    flash = GradSampleModuleFlashClipping(model)
    ids = torch.randint(9, shape)
    flash.expect_samples(4)
    with pytest.raises(FlashClippingError, match="drew 4 samples, .* batch of"):
        flash(ids)
    with torch.no_grad():
        flash(ids)
    mean_squares(flash(ids.view(4, 4))).backward()
    assert len(flash.get_norm_sample()) == 4
    flash.expect_samples(None)
    flash(ids)


# -- first reached later, checkpoints, other modes -------------------------------------------------


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.late, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.positions = nn.Embedding(9, 4)
        self.reach = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.reach:
            x = x + self.late(x.transpose(0, 1)).transpose(0, 1)
        return self.last(torch.tanh(x))


def test_a_layer_reached_later_is_rehearsed_then() -> None:
    model = Late().double()
    flash = GradSampleModuleFlashClipping(model)
    squares(flash, floats(3, 5, 4)).backward()
    model.reach = True
    flash.zero_grad()
    with pytest.raises(FlashClippingError, match=r"late \(Linear\).* 5 rows"):
        squares(flash, floats(5, 5, 4))


def test_a_layer_that_is_unfrozen_is_rehearsed_then() -> None:
    model = Late().double()
    model.reach = True
    model.late.requires_grad_(False)
    flash = GradSampleModuleFlashClipping(model)
    squares(flash, floats(3, 5, 4)).backward()
    flash.zero_grad()
    model.late.requires_grad_(True)
    with pytest.raises(FlashClippingError, match=r"late \(Linear\).* 5 rows"):
        squares(flash, floats(5, 5, 4))


class PositionsLate(Late):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.reach:
            x = x + self.positions(torch.arange(x.shape[1]))
        return self.last(torch.tanh(x))


def test_a_constant_reached_later() -> None:
    """Taken for samples by its size; the rehearsal refuses, and the next step is right."""
    model = PositionsLate().double()
    flash = GradSampleModuleFlashClipping(model)
    squares(flash, floats(3, 5, 4)).backward()
    model.reach = True
    flash.zero_grad()
    with pytest.raises(FlashClippingError, match=r"positions .*reached for the first time"):
        squares(flash, floats(5, 5, 4))
    batch = floats(5, 5, 4)
    plain = copy.deepcopy(model)
    plain.__dict__.pop("forward", None)
    squares(flash, batch).backward()
    reference = PositionsLate().double()
    reference.reach = True
    truth = truth_by_autograd(reference, batch, squares)
    assert_close(flash.get_norm_sample(), truth.norms, 1e-9)


class Checkpointed(nn.Module):
    """Constants, computed inside or outside of checkpoints."""

    def __init__(self, reentrant: bool, inside: bool):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.positions, self.mlp = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.reentrant, self.inside = reentrant, inside

    def work(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mlp(x))
        if self.inside:
            x = x + self.positions(torch.arange(x.shape[1]))
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if not self.inside:
            x = x + self.positions(torch.arange(x.shape[1]))
        for _ in range(2):
            x = checkpoint(self.work, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_constants_and_checkpoints(reentrant: bool, inside: bool, mode: str) -> None:
    for shape in ((5, 5, 4), (3, 5, 4)):
        check(Checkpointed(reentrant, inside).double(), floats(*shape), squares, mode=mode)


@pytest.mark.parametrize("shape", [(3, 5), (5, 5), (2, 2)])
def test_time_first(shape: tuple[int, int]) -> None:
    """``batch_first=False`` with positions ``[T, 1, d]``."""

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
            self.positions = nn.Embedding(9, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x)) + self.positions(torch.arange(len(x))[:, None])
            return self.last(x).transpose(0, 1)

    B, T = shape
    (x,) = floats(B, T, 4)

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        return mean_squares(model(batch[0].transpose(0, 1)))

    truth = truth_by_autograd(TimeFirst().double(), (x,), loss)
    flash = GradSampleModuleFlashClipping(TimeFirst().double(), batch_first=False)
    loss(flash, (x,)).backward()
    assert_close(flash.get_norm_sample(), truth.norms, 1e-9)


def test_steady_steps_do_not_rehearse() -> None:
    model = OnConstants("looked_up").double()
    runs: list[int] = []
    model.last.register_forward_hook(lambda *_: runs.append(1))
    flash = GradSampleModuleFlashClipping(model)
    for shape in ((3, 5), (5, 5), (4, 7), (1, 5)):
        squares(flash, floats(*shape, 4)).backward()
    assert len(runs) == 2 + 4


def test_rehearsal_is_only_for_training() -> None:
    model = OnConstants("looked_up").double()
    runs: list[int] = []
    model.last.register_forward_hook(lambda *_: runs.append(1))
    flash = GradSampleModuleFlashClipping(model)
    with torch.no_grad():
        flash(*floats(3, 5, 4))
    assert len(runs) == 1
    flash(*floats(3, 5, 4))
    assert len(runs) == 1 + 3


# -- the criterion and check know how many losses there are ----------------------------------------


class Recurrent(nn.Module):
    """Reads ``[T, B]`` and gives ``[B, classes]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids_TB: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids_TB))).mean(0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clipping", ["flat", "adaptive"])
def test_time_first_input_is_refused_by_the_criterion(clipping: str, mode: str) -> None:
    """``[T, B]`` with ``batch_first=True``: ``T`` samples. The targets know better."""
    from opacus.optimizers import DPOptimizerFastGradientClipping

    from flash_clipping.integration.criterion import FlashAdaptiveLoss, FlashLoss

    ids, target = torch.randint(9, (6, 4)), torch.randint(3, (4,))
    for batch_first in (True, False):
        model = Recurrent()
        flash = GradSampleModuleFlashClipping(model, mode=mode, batch_first=batch_first)
        optimizer = DPOptimizerFastGradientClipping(
            torch.optim.SGD(model.parameters(), lr=0.1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=4,
        )
        kind = FlashLoss if clipping == "flat" else FlashAdaptiveLoss
        criterion = kind(flash, optimizer, nn.CrossEntropyLoss(), "mean")
        if batch_first:
            with pytest.raises(FlashClippingError, match="found 4 losses, .* batch of 6 samples"):
                criterion(flash(ids), target)
        else:
            criterion(flash(ids), target)


def test_tokens_are_refused_by_the_criterion() -> None:
    """``[total]``: every token a sample, but one loss for each sequence."""
    from opacus.optimizers import DPOptimizerFastGradientClipping

    from flash_clipping.integration.criterion import FlashLoss

    class Sequences(Recurrent):
        def forward(self, ids_N: Tensor) -> Tensor:
            return self.head(self.embed(ids_N)).unflatten(0, (4, -1)).mean(1)

    model = Sequences()
    flash = GradSampleModuleFlashClipping(model)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
    )
    criterion = FlashLoss(flash, optimizer, nn.CrossEntropyLoss(), "mean")
    with pytest.raises(FlashClippingError, match="found 4 losses, .* batch of 16 samples"):
        criterion(flash(torch.randint(9, (16,))), torch.randint(3, (4,)))


def test_check_counts_losses() -> None:
    from flash_clipping.diagnostics import check as compare

    batch = (torch.randint(9, (6, 4)), torch.randint(3, (4,)))

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    report = compare(Recurrent(), batch, loss)
    assert not report.passed and "4 losses, but the batch has 6 samples" in report.failures[0]
    assert compare(Recurrent(), batch, loss, batch_first=False).passed


def test_check_tries_other_sizes() -> None:
    from flash_clipping.diagnostics import check as compare

    seen: list[int] = []

    class Watched(AtPositions):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return super().forward(x)

    assert compare(Watched("embedding"), torch.randn(3, 5, 4)).passed
    assert {2, 3, 4, 5} <= set(seen)

    class Wrong(AtPositions):
        """Goes wrong when there are as many samples as positions."""

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return 2 * y if len(x) == x.shape[1] else y

    report = compare(Wrong("embedding"), torch.randn(3, 5, 4))
    assert not report.passed and "With 5 samples, as many as another" in report.failures[0]
