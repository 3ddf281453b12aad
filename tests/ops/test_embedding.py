from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from flash_clipping.ops.embedding import embedding_clipped_sum, embedding_sqnorms, tied_cross_term
from flash_clipping.ops.runtime.backend import is_interpreting, is_triton_available
from tests.ops.cases import (
    Case,
    every_case,
    every_case_interpreted_once,
    relative_error,
    worst_relative_error,
)
from tests.support.errors import raises

V = 11

pytestmark = pytest.mark.usefixtures("ranks_in_few_programs")


def kernels() -> ModuleType:
    return importlib.import_module("flash_clipping.ops.embedding.triton")


@pytest.fixture
def ranks_in_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter pays for operators and little for their size: ids are ranked in wide tiles.

    The order is the same, bit for bit; of the tiles that a GPU gets, it is tested in
    ``test_ranks_are_a_stable_sort``.
    """
    if is_interpreting():
        monkeypatch.setattr(kernels(), "RANKED", (32, 256, 1))


def per_sample_tables(ids: torch.Tensor, G: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    """The oracle: ``[B, V, d]`` in float64 on the CPU."""
    onehot = torch.nn.functional.one_hot(ids.cpu(), V).double()
    if padding_idx is not None:
        onehot[..., padding_idx] = 0
    return torch.einsum("btv,btd->bvd", onehot, G.cpu().double())


def random_ids(case: Case, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(V, shape, generator=generator).to(case.device)


@every_case
@pytest.mark.parametrize(
    "shape", [(3, 37, 24), (1, 1, 8), (2, 130, 5), (0, 4, 8), (2, 0, 8)], ids=str
)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_norms_match_the_oracle(case: Case, shape: tuple, padding_idx: int | None) -> None:
    B, T, d = shape
    ids, G = random_ids(case, B, T), case.randn(B, T, d)
    sq = embedding_sqnorms(ids, G, padding_idx=padding_idx, backend=case.backend)
    oracle = per_sample_tables(ids, G, padding_idx).square().sum((1, 2))
    assert sq.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert worst_relative_error(sq, oracle) <= case.tolerance


def test_bitwise_equal_from_run_to_run_with_two_threads() -> None:
    ids, G = torch.zeros(2, 1024, dtype=torch.long), torch.randn(2, 1024, 128)
    torch.set_num_threads(2)
    try:
        runs = [embedding_sqnorms(ids, G, backend="torch") for _ in range(50)]
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(run, runs[0]) for run in runs)


@every_case_interpreted_once
@pytest.mark.parametrize(
    ("ids_of", "positions"),
    [
        *(("same", positions) for positions in (5, 70, 128, 150)),
        *(("distinct", positions) for positions in (5, 150)),
        ("int32", 70),
    ],
)
def test_runs_of_any_length(case: Case, ids_of: str, positions: int) -> None:
    B, T, d = 2, positions, 12
    G = case.randn(B, T, d)
    ids = torch.full((B, T), 4, device=case.device)
    if ids_of == "distinct":
        ids = torch.arange(B * T, device=case.device).view(B, T).flip(1) * 1000
    sq = embedding_sqnorms(ids.int() if ids_of == "int32" else ids, G, backend=case.backend)
    rows = G.cpu().double()
    oracle = rows.square().sum((1, 2)) if ids_of == "distinct" else rows.sum(1).square().sum(1)
    assert worst_relative_error(sq, oracle) <= 2 * case.tolerance


#: Lengths of runs that begin or end on the boundary of a chunk, or go through several.
LENGTHS = [
    (200,),
    (31, 1, 168),
    (32, 32, 136),
    (10, 22, 33, 31, 96, 8),
    (1, 198, 1),
    (130, 35, 35),
]


@every_case_interpreted_once
@pytest.mark.parametrize(
    ("lengths", "ranked"),
    [
        *((lengths, False) for lengths in LENGTHS),
        (LENGTHS[3], True),
        # Ranks give the same order, of which every element is compared below.
        *(
            pytest.param(lengths, True, marks=pytest.mark.slow)
            for lengths in LENGTHS
            if lengths != LENGTHS[3]
        ),
    ],
    ids=str,
)
def test_runs_that_cross_many_chunks(
    case: Case, lengths: tuple[int, ...], ranked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.backend == "triton" and not ranked:  # as samples with more positions are
        monkeypatch.setattr(kernels(), "MAX_RANKED", 0)
    runs = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    ids = runs[shuffled].expand(1, -1).to(case.device)
    G = case.randn(1, 200, 8)
    for padding_idx in (None, 1):
        sq = embedding_sqnorms(ids, G, padding_idx=padding_idx, backend=case.backend)
        oracle = per_sample_tables(ids, G, padding_idx).square().sum((1, 2))
        assert worst_relative_error(sq, oracle) <= 2 * case.tolerance


@every_case_interpreted_once
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ranked", [True, False])
def test_the_largest_ids(
    case: Case, ranked: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.backend == "triton" and not ranked:
        monkeypatch.setattr(kernels(), "MAX_RANKED", 0)
    small, G = random_ids(case, 2, 139), case.randn(2, 139, 8)
    largest = torch.tensor([0, 1, 2**16, 2**20, 2**24, 2**31 - 2], device=case.device)
    ids = largest[small % 6].to(dtype)
    sq = embedding_sqnorms(ids, G, backend=case.backend)
    oracle = per_sample_tables(small % 6, G, None).square().sum((1, 2))
    assert worst_relative_error(sq, oracle) <= case.tolerance


@every_case_interpreted_once
@pytest.mark.parametrize("width", [8, 300, 1030])
def test_features_that_one_program_does_not_cover(case: Case, width: int) -> None:
    ids, G = random_ids(case, 2, 140), case.randn(2, 140, width)
    sq = embedding_sqnorms(ids, G, padding_idx=2, backend=case.backend)
    oracle = per_sample_tables(ids, G, 2).square().sum((1, 2))
    assert worst_relative_error(sq, oracle) <= case.tolerance


@every_case_interpreted_once
@pytest.mark.parametrize("num_embeddings", [1, 2, 3])
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_tables_of_a_few_rows(case: Case, num_embeddings: int, padding_idx: int | None) -> None:
    """Token types: runs are so long that programs which follow them would be alone."""
    ids, G = random_ids(case, 2, 200) % num_embeddings, case.randn(2, 200, 48)
    sq = embedding_sqnorms(
        ids, G, padding_idx=padding_idx, num_embeddings=num_embeddings, backend=case.backend
    )
    oracle = per_sample_tables(ids, G, padding_idx).square().sum((1, 2))
    assert worst_relative_error(sq, oracle) <= case.tolerance


def test_which_tables_are_taken_as_linear_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_triton_available():
        pytest.skip("no kernels here")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    taken = []
    outer = kernels().outer_triton.outer_sqnorms

    def watched(onehot: torch.Tensor, G: torch.Tensor, store: bool) -> object:
        taken.append(onehot)
        return outer(onehot, G, store)

    monkeypatch.setattr(kernels().outer_triton, "outer_sqnorms", watched)
    ids = torch.ones(2, 192, dtype=torch.long, device=device)
    G = torch.randn(2, 192, 48).to(device)
    ids[0, ::3] = 2
    for num_embeddings, padding_idx, width in (
        (None, None, 48),
        (4, None, 48),  # too many rows for so few positions
        (3, 1, 48),
        (3, None, 47),  # and for so few features
    ):
        embedding_sqnorms(
            ids,
            G[..., :width],
            num_embeddings=num_embeddings,
            padding_idx=padding_idx,
            backend="triton",
        )
    assert not taken
    embedding_sqnorms(ids, G, num_embeddings=3, backend="triton")
    (onehot,) = taken
    assert onehot.shape == (2, 192, 8) and onehot.dtype == G.dtype
    assert torch.equal(onehot.argmax(-1), ids) and (onehot.sum(-1) == 1).all()


@every_case_interpreted_once
@pytest.mark.parametrize("positions", [20, 150])
def test_norms_in_parts(case: Case, positions: int) -> None:
    ids, G = random_ids(case, 3, positions), case.randn(3, positions, 40)
    parts = embedding_sqnorms(ids, G, in_parts=True, backend=case.backend)
    assert parts.dim() == 2 and len(parts) == 3 and (parts >= 0).all()
    whole = embedding_sqnorms(ids, G, backend=case.backend)
    assert torch.equal(parts.sum(1), whole)


@every_case_interpreted_once
@pytest.mark.parametrize("positions", [20, 150])
def test_rows_that_are_not_finite_stay_with_their_sample_and_run(
    case: Case, positions: int
) -> None:
    """They make the norm of their sample so, and where they are padding they are not there."""
    ids, G = random_ids(case, 3, positions), case.randn(3, positions, 8)
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


@every_case
def test_half_of_the_positions_hold_one_id(case: Case) -> None:
    """As where texts are filled up with an id that is not the table's ``padding_idx``."""
    ids, G = random_ids(case, 2, 150), case.randn(2, 150, 20)
    ids[:, 75:] = 7
    sq = embedding_sqnorms(ids, G, backend=case.backend)
    oracle = per_sample_tables(ids, G, None).square().sum((1, 2))
    assert worst_relative_error(sq, oracle) <= 2 * case.tolerance
    assert torch.equal(sq, embedding_sqnorms(ids, G, backend=case.backend))


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
def test_one_index_for_each_sample_and_strided_gradients(case: Case) -> None:
    ids, G = random_ids(case, 4), case.randn(4, 32)[:, ::2]
    sq = embedding_sqnorms(ids, G, backend=case.backend)
    assert worst_relative_error(sq, G.double().square().sum(1)) <= case.tolerance
    G = case.randn(9, 4, 16).transpose(0, 1)
    ids = random_ids(case, 9, 4).mT
    sq = embedding_sqnorms(ids, G, backend=case.backend)
    oracle = per_sample_tables(ids, G, None).square().sum((1, 2))
    assert worst_relative_error(sq, oracle) <= case.tolerance


@every_case_interpreted_once
@pytest.mark.parametrize(
    ("positions", "ranked"),
    [
        (20, True),
        (150, True),
        (160, False),
        pytest.param(160, True, marks=pytest.mark.slow),
        pytest.param(150, False, marks=pytest.mark.slow),
    ],
)
def test_ids_that_lie_apart(
    case: Case, positions: int, ranked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that all samples share, and ids of a transposed batch."""
    if case.backend == "triton" and not ranked:  # as samples with more positions are
        monkeypatch.setattr(kernels(), "MAX_RANKED", 0)
    G = case.randn(2, positions, 8)
    shared = random_ids(case, 1, positions).expand(2, -1)
    transposed = random_ids(case, positions, 2).T
    for ids in (shared, transposed):
        sq = embedding_sqnorms(ids, G, backend=case.backend)
        oracle = per_sample_tables(ids, G, None).square().sum((1, 2))
        assert worst_relative_error(sq, oracle) <= case.tolerance


@every_case
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("T", [20, 200, 4000])
def test_clipped_sum(case: Case, T: int, padding_idx: int | None) -> None:
    ids, G = random_ids(case, 3, T), case.randn(3, T, 8)
    G[1] = float("inf")
    coef = torch.tensor([0.5, 0.0, 1.0], device=case.device)
    total = embedding_clipped_sum(ids, G, coef, V, padding_idx=padding_idx, backend=case.backend)
    tables = per_sample_tables(ids, G, padding_idx)
    oracle = 0.5 * tables[0] + tables[2]
    # PyTorch's own kernel adds in the table's dtype on a CPU.
    assert relative_error(total, oracle) <= max(4 * case.rounding, 1e-6)


@every_case
@pytest.mark.parametrize(
    "shape", [(2, 19, 23, 24), (1, 1, 1, 8), (2, 70, 33, 5), (0, 3, 3, 8)], ids=str
)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_tied_cross_term(case: Case, shape: tuple, padding_idx: int | None) -> None:
    B, T, S, d = shape
    ids, Gemb = random_ids(case, B, T), case.randn(B, T, d)
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
