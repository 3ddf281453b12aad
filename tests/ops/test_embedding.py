from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_clipping.ops.embedding import embedding_sqnorms, tied_cross_term
from flash_clipping.ops.runtime.backend import is_triton_available
from tests.ops.cases import (
    Case,
    every_case,
    every_case_interpreted_once,
    worst_relative_error,
)
from tests.support.errors import raises

V = 11

pytestmark = pytest.mark.usefixtures("ranks_in_few_programs")


def kernels() -> ModuleType:
    return importlib.import_module("flash_clipping.ops.embedding.triton")


def per_sample_tables(ids: torch.Tensor, G: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    """The oracle: ``[B, V, d]`` in float64 on the CPU."""
    onehot = torch.nn.functional.one_hot(ids.cpu(), V).double()
    if padding_idx is not None:
        onehot[..., padding_idx] = 0
    return torch.einsum("btv,btd->bvd", onehot, G.cpu().double())


def random_ids(device: str, *shape: int) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(0)).to(device)


@dataclass(frozen=True)
class Ids:
    """Positions of a batch, and how kernels find equal ones among them.

    Attributes:
        d: features of each.
        rows: of the table, if it is told.
        orders: whether ids are ranked, or sorted as those of samples with more positions are.
        slack: of the tolerance.
    """

    ids: Tensor
    d: int = 8
    padding: tuple[int | None, ...] = (None,)
    rows: int | None = None
    orders: tuple[str, ...] = ("ranked",)
    slack: int = 1


def runs_of(lengths: tuple[int, ...]) -> Tensor:
    """Ids of 200 positions, of which so many are equal, in any order."""
    runs = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return runs[torch.randperm(200, generator=torch.Generator().manual_seed(0))].view(1, -1)


LARGEST = torch.tensor([0, 1, 2**16, 2**20, 2**24, 2**31 - 2])[random_ids("cpu", 2, 139) % 6]
BOTH: dict[str, Any] = {"orders": ("ranked", "sorted")}
LATER: dict[str, Any] = {"orders": ("sorted",)}
IDS = {
    **{f"{T} alike": Ids(torch.full((2, T), 4), 12, slack=2) for T in (5, 150)},
    "150 distinct": Ids(torch.arange(300).view(2, 150).flip(1) * 1000, 12, slack=2),
    "runs in one chunk and more": Ids(
        runs_of((10, 22, 33, 31, 96, 8)), padding=(None, 1), slack=2, **BOTH
    ),
    # They begin or end on the boundary of a chunk, or go through several.
    **{
        f"runs of {lengths}": Ids(runs_of(lengths), padding=(None, 1), slack=2, **LATER)
        for lengths in ((200,), (32, 32, 136), (1, 198, 1))
    },
    # As where texts are filled up with an id that is not the table's ``padding_idx``.
    "half alike": Ids(
        torch.cat([random_ids("cpu", 2, 75), torch.full((2, 75), 7)], 1), 20, slack=2
    ),
    "the largest": Ids(LARGEST, **BOTH),
    "the largest, int32": Ids(LARGEST.int(), **BOTH),
    # More than one program covers.
    **{f"{d} features": Ids(random_ids("cpu", 2, 140), d, padding=(2,)) for d in (1030,)},
    # Token types: runs are so long that programs which follow them would be alone.
    **{
        f"{rows} rows": Ids(random_ids("cpu", 2, 200) % rows, 48, padding=(None, 1), rows=rows)
        for rows in (1, 3)
    },
    # Positions that all samples share, and ids of a transposed batch.
    **{
        f"{T} {name}": Ids(ids, **how)
        for T, how in ((20, {}), (160, LATER))
        for name, ids in (
            ("shared", random_ids("cpu", 1, T).expand(2, -1)),
            ("transposed", random_ids("cpu", T, 2).T),
        )
    },
}


@every_case_interpreted_once
@pytest.mark.parametrize(
    ("name", "order"), [(name, order) for name, of in IDS.items() for order in of.orders]
)
def test_norms_of_any_ids_match_the_oracle_and_repeat(
    case: Case, name: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.backend == "triton" and order == "sorted":
        monkeypatch.setattr(kernels(), "MAX_RANKED", 0)
    of = IDS[name]
    ids = of.ids.to(case.device)  # with its strides
    if not of.ids.stride(0):
        ids = ids[:1].expand_as(ids)
    G = case.randn(*ids.shape, of.d)
    values, places = of.ids.unique(return_inverse=True)
    onehot_BTv = torch.nn.functional.one_hot(places).double()
    for padding_idx in of.padding:
        given: Any = {"padding_idx": padding_idx, "num_embeddings": of.rows}
        sq = embedding_sqnorms(ids, G, **given, backend=case.backend)
        kept_BTv = onehot_BTv * (values != (-1 if padding_idx is None else padding_idx))
        tables = torch.einsum("btv,btd->bvd", kept_BTv, G.cpu().double())
        assert worst_relative_error(sq, tables.square().sum((1, 2))) <= of.slack * case.tolerance
    assert torch.equal(sq, embedding_sqnorms(ids, G, **given, backend=case.backend))


def test_bitwise_equal_from_run_to_run_with_two_threads() -> None:
    ids, G = torch.zeros(2, 1024, dtype=torch.long), torch.randn(2, 1024, 128)
    torch.set_num_threads(2)
    try:
        runs = [embedding_sqnorms(ids, G, backend="torch") for _ in range(20)]
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(run, runs[0]) for run in runs)


@every_case_interpreted_once
@pytest.mark.parametrize("positions", [20, 150])
def test_rows_that_are_not_finite_stay_with_their_sample_and_run(
    case: Case, positions: int
) -> None:
    """They make the norm of their sample so, and where they are padding they are not there."""
    ids, G = random_ids(case.device, 3, positions), case.randn(3, positions, 8)
    ids[1], ids[1, 0] = 4, 3
    G[1, 0] = float("inf")
    sq = embedding_sqnorms(ids, G, backend=case.backend)
    assert not sq[1].isfinite() and sq[[0, 2]].isfinite().all()
    G[1, 1] = float("nan")
    assert embedding_sqnorms(ids, G, backend=case.backend)[1].isnan()
    G[1, 1] = 1.0
    sq = embedding_sqnorms(ids, G, padding_idx=3, backend=case.backend)
    G[1, 0] = 0.0
    oracle = per_sample_tables(ids, G, 3).square().sum((1, 2))
    assert worst_relative_error(sq, oracle) <= 2 * case.tolerance


@every_case_interpreted_once
def test_a_long_run_is_added_up_in_parts(case: Case) -> None:
    """In one sum each further row would be lost beside the first."""
    G = torch.full((1, 1100, 12), 2.0**-24, dtype=torch.float64)
    G[:, 0] = 1
    ids = torch.full((1, 1100), 4, device=case.device)
    sq = embedding_sqnorms(ids, G.to(case.device, case.dtype), backend=case.backend)
    assert worst_relative_error(sq, G.sum(1).square().sum(1)) <= 1e-5


@pytest.mark.parametrize(
    ("shipped", "shape"),
    [(True, (3, 1)), (True, (2, 16)), (True, (1, 531)), (False, (3, 1)), (False, (2, 531))],
    ids=str,
)
def test_ranks_are_a_stable_sort(
    shipped: bool, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_triton_available():
        pytest.skip("no kernels here")
    if shipped:  # the tiles that a GPU gets: 531 ids take several turns
        monkeypatch.undo()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(97, shape, generator=generator).to(device)
    several = (ids, ids.mT.contiguous().mT, ids[:1].expand(4, -1))
    for laid_out in several if len(ids) > 1 else (ids,):
        T = shape[1]
        entries = kernels()._in_order(laid_out)
        wanted, order = torch.sort(laid_out, dim=1, stable=True)
        assert torch.equal(entries[:, :T] >> 32, wanted)
        assert torch.equal(entries[:, :T] & 0xFFFFFFFF, order)
        # Filled up to whole chunks with entries that no position has.
        assert entries.shape[1] % kernels().CHUNK == 0
        assert ((entries[:, T:] >> 32) == -1).all()


@every_case
@pytest.mark.parametrize(
    "shape", [(2, 19, 23, 24), (1, 1, 1, 8), (2, 70, 33, 5), (0, 3, 3, 8)], ids=str
)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_tied_cross_term_is_exact(case: Case, shape: tuple, padding_idx: int | None) -> None:
    B, T, S, d = shape
    ids, Gemb = random_ids(case.device, B, T), case.randn(B, T, d)
    Ahead, Ghead = case.randn(B, S, d, seed=1), case.randn(B, S, V, seed=2)
    cross, off = tied_cross_term(
        ids, Gemb, Ahead, Ghead, padding_idx=padding_idx, backend=case.backend
    )
    tables = per_sample_tables(ids, Gemb, padding_idx)
    head = torch.einsum("bsv,bsd->bvd", Ghead.cpu().double(), Ahead.cpu().double())
    oracle = (tables * head).sum((1, 2))
    scale = tables.square().sum((1, 2)).sqrt() * head.square().sum((1, 2)).sqrt()
    assert cross.shape == oracle.shape
    errors = (cross.cpu() - oracle).abs()
    assert (errors <= case.tolerance * scale).all()
    if case.backend == "torch":
        assert not off.any()
        return
    weights = Ghead.cpu().double().abs().gather(2, ids.cpu()[:, None].expand(-1, S, -1))
    if padding_idx is not None:
        weights = weights.masked_fill((ids.cpu() == padding_idx)[:, None], 0)
    norms = (x.cpu().double().norm(dim=2) for x in (Ahead, Gemb))
    spread = torch.einsum("bst,bs,bt->b", weights, *norms)
    assert (errors <= off.cpu()).all() and (off.cpu() <= 2e-5 * spread).all()
    assert (off.cpu() >= 1e-6 * spread).all()


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with raises("FC304", ValueError):
        ids = torch.zeros(2, 3, dtype=torch.long)
        embedding_sqnorms(ids, torch.randn(2, 3, 8), num_embeddings=2**31)
    with raises("FC303", ValueError, match="ids has shape"):
        embedding_sqnorms(torch.zeros(2, 3, dtype=torch.long), torch.randn(2, 4, 8))
