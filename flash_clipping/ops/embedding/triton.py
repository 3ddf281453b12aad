"""Kernels for embedding norms. B samples, T positions, S head positions, d features, V vocabulary.

The positions of a sample, if they are many, are put in the order of their ids and cut into chunks.
A program walks through a chunk row by row, adds up the rows of a run of equal ids, and squares the
sum where the run ends. A run belongs to the chunk that it begins in, whose program follows it to
its end: every number of ``G`` is read once, and nothing is passed from one program to another.
Few positions are taken in any order, by a Gram matrix under the mask ``id_t = id_t'``; a table of
a few rows, whose runs are long, as a linear map of one-hot vectors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.embedding import UNSORTED, adds_up_runs
from flash_clipping.ops.error_bounds import FLOOR, TOGETHER, lost_of
from flash_clipping.ops.outer import triton as outer_triton
from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.shapes import in_one_dtype
from flash_clipping.ops.runtime.tiles import gdc_launch_dependents, gdc_wait, launch

MAX_RANKED = 4096
"""Positions of a sample up to which all pairs of ids are compared; beyond, ``torch.sort``."""
RANKED = 16, 64, 8
"""Positions that a program ranks, ids with which it compares them at a time, and how often before
it loads again."""
CHUNK = 32
"""Positions of which a program owns the runs that begin there."""
UNROLL = 16
"""Rows taken without a branch between them: registers bound how many are in flight."""
FOLLOW = 4
"""Rows taken at a time where a run is followed beyond its chunk: more would take registers from all
programs."""
WARPS = 4
"""At most: each warp has 16 bytes of a row for a thread."""
BLOCK_BYTES = 256
"""Bytes of a row that such a program reads."""
_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _order_kernel(
    ids_ptr, entries_ptr,
    T, blocks, ids_stride_b, ids_stride_t,
    ROWS: tl.constexpr, IDS: tl.constexpr, STEPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A stable sort by counting: a position's rank is the number of those that come before it. An
    entry is an id, times 2**32, plus its position; entries behind the last have id -1."""
    if EARLY:  # the next kernel may start, and waits as this one does before it reads
        gdc_launch_dependents()
        gdc_wait()
    pid = tl.program_id(0)
    b = (pid // blocks).to(tl.int64)
    block = (pid % blocks) * ROWS
    ids = ids_ptr + b * ids_stride_b
    t = block + tl.arange(0, ROWS)
    s = tl.arange(0, IDS)
    id_t = tl.load(ids + t.to(tl.int64) * ids_stride_t, mask=t < T, other=0).to(tl.int32)
    own = block + s
    at = ids + own.to(tl.int64) * ids_stride_t
    id_own = tl.load(at, mask=own < T, other=_NO_ID).to(tl.int32)
    before = tl.zeros((ROWS, IDS), tl.int32)
    for first in range(0, T, IDS * STEPS):
        for step in tl.static_range(STEPS):
            other = first + step * IDS + s
            at = ids + other.to(tl.int64) * ids_stride_t
            id_s = tl.load(at, mask=other < T, other=_NO_ID).to(tl.int32)
            # Of equal ids, those of the blocks before come before.
            id_s -= (other < block).to(tl.int32)
            # The sign of a difference: an instruction less than a comparison.
            before += ((id_s[None, :] - id_t[:, None]).to(tl.uint32) >> 31).to(tl.int32)
    ties = (id_own[None, :] == id_t[:, None]) & (own[None, :] < t[:, None])
    rank = tl.sum(before + ties.to(tl.int32), 1).to(tl.int32)
    inside = t < T
    entry = tl.where(inside, id_t, -1).to(tl.int64) * 4294967296 + t
    tl.store(entries_ptr + b * (blocks * ROWS) + tl.where(inside, rank, t), entry)


@triton.jit
def _runs_kernel(
    G_ptr, entries_ptr, parts_ptr,
    length, d, chunks, slices, G_stride_b, G_stride_t, padding_idx,
    HAS_PADDING: tl.constexpr, WHOLE: tl.constexpr, CHUNK: tl.constexpr, UNROLL: tl.constexpr,
    FOLLOW: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Squared norms of a chunk's runs. ``length`` entries a sample, a multiple of ``CHUNK``. Where
    a run is followed, so many ``PARTS`` are added up before they meet it."""
    pid = tl.program_id(0)
    columns = pid % slices * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < d
    first = pid // slices % chunks * CHUNK
    b = (pid // slices // chunks).to(tl.int64)
    rows = G_ptr + b * G_stride_b + columns
    entries_ptr += b * length
    if EARLY:  # for the order
        gdc_wait()
    # The run that began before is another program's.
    others = tl.load(entries_ptr + first - 1, mask=first > 0, other=-1) >> 32
    current = others
    squares = tl.zeros((BLOCK_D,), tl.float32)
    run = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(first, first + CHUNK, UNROLL):
        for u in tl.static_range(UNROLL):
            entry = tl.load(entries_ptr + start + u)
            id = entry >> 32
            ours = (id != others) & (id >= 0)
            if HAS_PADDING:
                ours = ours & (id != padding_idx)
            mask = ours if WHOLE else ours & inside
            at = rows + (entry & 0xFFFFFFFF) * G_stride_t
            G = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            begins = id != current
            squares = tl.where(begins, squares + run * run, squares)
            run = tl.where(begins, G, run + G)
            current = id
    goes_on = (current != others) & (current >= 0)
    if HAS_PADDING:
        goes_on = goes_on & (current != padding_idx)
    if goes_on:
        start = first + CHUNK
        part = tl.zeros((BLOCK_D,), tl.float32)
        s = tl.arange(0, FOLLOW)
        following = tl.load(entries_ptr + start, mask=start < length, other=-1)
        entry = tl.load(entries_ptr + start + s, mask=start + s < length, other=-1)
        while following >> 32 == current:
            mask = ((entry >> 32) == current)[:, None] & inside[None, :]
            at = rows[None, :] + ((entry & 0xFFFFFFFF) * G_stride_t)[:, None]
            G = tl.load(at, mask=mask, other=0.0)
            start += FOLLOW
            following = tl.load(entries_ptr + start, mask=start < length, other=-1)
            entry = tl.load(entries_ptr + start + s, mask=start + s < length, other=-1)
            part += tl.sum(G.to(tl.float32), 0)
            is_full = (start - first - CHUNK) % (FOLLOW * PARTS) == 0
            run = tl.where(is_full, run + part, run)
            part = tl.where(is_full, 0.0, part)
        run += part
    tl.store(parts_ptr + pid, tl.sum(squares + run * run, 0))


@triton.jit
def _pairs_kernel(
    G_ptr, ids_ptr, parts_ptr,
    T, d, slices, ids_stride_b, ids_stride_t, G_stride_b, G_stride_t, padding_idx,
    HAS_PADDING: tl.constexpr, POSITIONS: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A sample's Gram matrix under the mask ``id_t = id_t'``, of as many features as it loads."""
    pid = tl.program_id(0)
    b = (pid // slices).to(tl.int64)
    t = tl.arange(0, POSITIONS)
    valid = t < T
    ids = tl.load(ids_ptr + b * ids_stride_b + t.to(tl.int64) * ids_stride_t, mask=valid, other=0)
    if HAS_PADDING:
        valid = valid & (ids != padding_idx)
    columns = pid % slices * BLOCK_D + tl.arange(0, BLOCK_D)
    at = G_ptr + b * G_stride_b + t.to(tl.int64)[:, None] * G_stride_t + columns[None, :]
    G = tl.load(at, mask=valid[:, None] & (columns < d)[None, :], other=0.0)
    gram = tl.dot(G, tl.trans(G), input_precision=PRECISION, max_num_imprecise_acc=BLOCK_D)
    # A select, not a product: rows of another run may be infinite. What is masked is zero.
    kept = tl.where(ids[:, None] == ids[None, :], gram, 0.0)
    total = tl.sum(tl.sum(kept, 1), 0)
    # A sum of squares; rounding can leave one that cancels just below zero.
    tl.store(parts_ptr + pid, tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL))


def embedding_sqnorms(
    ids_BT: Tensor, G_BTd: Tensor, padding_idx: int | None, num_embeddings: int | None = None
) -> Tensor:
    """See :func:`flash_clipping.ops.embedding.embedding_sqnorms`: parts ``[B, n]``."""
    G_BTd = tiles.with_unit_stride(G_BTd)
    B, T, d = G_BTd.shape
    if T > UNSORTED and not adds_up_runs(T, d, num_embeddings, padding_idx):
        # One-hot vectors, of which the table is a linear map, in rows of a multiple of 16 bytes,
        # which tensor descriptors want; no id is as high.
        rows = T if num_embeddings is None else num_embeddings
        every_id = torch.arange(tiles.cdiv(rows, 8) * 8, device=ids_BT.device)
        one_hot = (ids_BT.unsqueeze(-1) == every_id).to(G_BTd.dtype)
        return outer_triton.outer_sqnorms(one_hot, G_BTd, False)[0]
    padding = {"HAS_PADDING": padding_idx is not None}
    if T <= UNSORTED:
        block_d = BLOCK_BYTES // G_BTd.element_size()
        slices = tiles.cdiv(d, block_d)
        parts = G_BTd.new_empty((B, slices), dtype=torch.float32)
        launch(
            _pairs_kernel, B * slices,
            G_BTd, ids_BT, parts, T, d, slices, *ids_BT.stride(), *G_BTd.stride()[:2],
            padding_idx or 0,
            **padding, POSITIONS=max(16, tiles.next_power_of_2(T)), BLOCK_D=block_d,
            PRECISION=tiles.dot_precision(G_BTd.dtype),
            num_warps=4,
        )  # fmt: skip
        return parts
    entries = _in_order(ids_BT)
    length = entries.shape[1]
    of_warp = 32 * 16 // G_BTd.element_size()
    warps = min(WARPS, tiles.next_power_of_2(tiles.cdiv(d, of_warp)))
    slices, chunks = tiles.cdiv(d, warps * of_warp), length // CHUNK
    parts = G_BTd.new_empty((B, chunks * slices), dtype=torch.float32)
    launch(
        _runs_kernel, parts.numel(),
        G_BTd, entries, parts, length, d, chunks, slices, *G_BTd.stride()[:2], padding_idx or 0,
        **padding, WHOLE=d % (warps * of_warp) == 0, CHUNK=CHUNK, UNROLL=UNROLL, FOLLOW=FOLLOW,
        PARTS=TOGETHER // FOLLOW, BLOCK_D=warps * of_warp, **_start(G_BTd.device),
        num_warps=warps,
    )  # fmt: skip
    return parts


def _start(device: torch.device) -> dict[str, bool]:
    """Options of a launch, which starts before what it depends on has ended where it can."""
    early = tiles.starts_early(device)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def _in_order(ids_BT: Tensor) -> Tensor:
    """Entries of :func:`_order_kernel`, a multiple of ``CHUNK`` of them. Stable, so that equal ids
    keep one order and their sums one rounding; ids have 31 bits."""
    B, T = ids_BT.shape
    length = tiles.cdiv(T, CHUNK) * CHUNK
    if T > MAX_RANKED:
        positions = torch.arange(T, device=ids_BT.device)
        in_order = (ids_BT.long() * 2**32 + positions).sort(dim=1).values
        # Into memory of their own: sorting keeps the strides of transposed ids.
        entries = torch.full((B, length), -1, dtype=torch.int64, device=ids_BT.device)
        entries[:, :T] = in_order
        return entries
    entries = torch.empty((B, length), dtype=torch.int64, device=ids_BT.device)
    rows, ids, steps = RANKED
    blocks = length // rows
    launch(
        _order_kernel, B * blocks,
        ids_BT, entries, T, blocks, *ids_BT.stride(),
        ROWS=rows, IDS=ids, STEPS=steps, **_start(ids_BT.device),
        num_warps=2,
    )  # fmt: skip
    return entries


@triton.jit
def _tied_kernel(
    ids_ptr, Gemb_ptr, Ahead_ptr, Ghead_ptr, partial_ptr,
    T, S, d, V, Gemb_stride_b, Gemb_stride_t, Ahead_stride_b, Ahead_stride_s, Ghead_stride_b,
    Ghead_stride_s, t_blocks, s_blocks, padding_idx, floor,
    HAS_PADDING: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    b = pid // (t_blocks * s_blocks)
    rest = pid % (t_blocks * s_blocks)
    t0 = (rest // s_blocks) * BLOCK_T
    s0 = (rest % s_blocks) * BLOCK_S
    products = tl.zeros((BLOCK_S, BLOCK_T), tl.float32)
    a_sq = tl.zeros((BLOCK_S,), tl.float32)
    g_sq = tl.zeros((BLOCK_T,), tl.float32)
    for k in range(0, d, BLOCK_D):
        a = tiles.load_tile(
            Ahead_ptr, b, s0, k, S, d, Ahead_stride_b, Ahead_stride_s, BLOCK_S, BLOCK_D, False
        )
        g = tiles.load_tile(
            Gemb_ptr, b, t0, k, T, d, Gemb_stride_b, Gemb_stride_t, BLOCK_T, BLOCK_D, False
        )
        # See gram/triton.py: the accumulator of the tensor cores truncates, so it starts afresh.
        products += tl.dot(a, tl.trans(g), input_precision=PRECISION, max_num_imprecise_acc=BLOCK_D)
        a_wide, g_wide = a.to(tl.float32), g.to(tl.float32)
        a_sq += tl.sum(a_wide * a_wide, 1)
        g_sq += tl.sum(g_wide * g_wide, 1)
    t = t0 + tl.arange(0, BLOCK_T)
    s = s0 + tl.arange(0, BLOCK_S)
    wide_b = b.to(tl.int64)
    ids = tl.load(ids_ptr + wide_b * T + t, mask=t < T, other=-1).to(tl.int64)
    # A mask does not make a bad address safe: an id outside the vocabulary addresses nothing.
    valid = (t < T) & (ids >= 0) & (ids < V)
    if HAS_PADDING:
        valid = valid & (ids != padding_idx)
    inside = (s < S)[:, None] & valid[None, :]
    start = Ghead_ptr + wide_b * Ghead_stride_b
    weights = tl.load(
        start + s.to(tl.int64)[:, None] * Ghead_stride_s + tl.where(valid, ids, 0)[None, :],
        mask=inside,
        other=0.0,
    )
    weights = weights.to(tl.float32)
    kept = tl.where(inside, products * weights, 0.0)
    lengths = tl.sqrt(a_sq + floor)[:, None] * tl.sqrt(g_sq + floor)[None, :]
    spread = tl.where(inside, lengths * tl.abs(weights), 0.0)
    tl.store(partial_ptr + 2 * pid, tl.sum(tl.sum(kept, 1), 0))
    tl.store(partial_ptr + 2 * pid + 1, tl.sum(tl.sum(spread, 1), 0))


def tied_cross_term(
    ids_BT: Tensor, Gemb_BTd: Tensor, Ahead_BSd: Tensor, Ghead_BSV: Tensor, padding_idx: int | None
) -> tuple[Tensor, Tensor]:
    Gemb_BTd, Ahead_BSd = tiles.with_unit_stride(Gemb_BTd), tiles.with_unit_stride(Ahead_BSd)
    Ghead_BSV = tiles.with_unit_stride(Ghead_BSV)
    Gemb_BTd, Ahead_BSd = in_one_dtype(Gemb_BTd, Ahead_BSd)
    B, T, d = Gemb_BTd.shape
    S, V = Ghead_BSV.shape[1:]
    if S == 0:
        nothing_B = torch.zeros(B, dtype=torch.float32, device=Gemb_BTd.device)
        return nothing_B, nothing_B.clone()
    block, block_d = 64, 32 if Gemb_BTd.element_size() == 4 else 64
    t_blocks, s_blocks = tiles.cdiv(T, block), tiles.cdiv(S, block)
    size = B, t_blocks * s_blocks, 2
    partial = torch.empty(size, dtype=torch.float32, device=Gemb_BTd.device)
    launch(
        _tied_kernel, partial.numel() // 2,
        ids_BT.contiguous(), Gemb_BTd, Ahead_BSd, Ghead_BSV, partial, T, S, d, V,
        *Gemb_BTd.stride()[:2], *Ahead_BSd.stride()[:2], *Ghead_BSV.stride()[:2], t_blocks,
        s_blocks, 0 if padding_idx is None else padding_idx, FLOOR * d,
        HAS_PADDING=padding_idx is not None, BLOCK_T=block, BLOCK_S=block, BLOCK_D=block_d,
        PRECISION=tiles.dot_precision(Gemb_BTd.dtype),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    cross_B, spread_B = partial.sum(1).unbind(1)
    # Of an entry: what tensor cores lose of a block of features, blocks added up, and a sum over
    # all entries, tile by tile.
    lost = lost_of(Gemb_BTd.dtype)
    return cross_B, spread_B * (block_d * lost + (tiles.cdiv(d, block_d) + 128) * 2.0**-24)
