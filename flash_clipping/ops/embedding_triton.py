"""Kernels for embedding norms. B samples, T positions, S head positions, d features, V vocabulary.

The positions of a sample, if they are many, are taken in the order of their ids and cut into
chunks. Within a chunk the norm is a small Gram matrix under the mask ``id_t = id_t'``. A run of
equal ids that crosses a boundary leaves the sum of its rows at both ends, and a second kernel walks
along the boundaries. Every row of ``G`` is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops import tiles_triton as tiles
from flash_clipping.ops.launch_triton import launch

MAX_RANKED = 4096
"""Positions of a sample up to which all pairs of ids are compared; beyond, ``torch.sort``."""
RANKED = 16, 512
"""Positions that a program ranks, and ids with which it compares them at a time."""
CHUNK = 64
UNSORTED = 128
"""Positions of a sample up to which they are one chunk, in any order: a launch instead of three."""
BLOCK_BYTES = 256
"""Of a row that one step reads."""
SLICE_D = 512
"""Features that one program walks over; of a sample that is one chunk, those of one step."""
_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _rank_kernel(
    ids_ptr,
    sorted_ptr,
    order_ptr,
    T,
    blocks,
    ids_stride_b,
    ids_stride_t,
    ROWS: tl.constexpr,
    IDS: tl.constexpr,
):
    """A stable sort by counting: a position's rank is the number of those that come before it."""
    pid = tl.program_id(0)
    b = (pid // blocks).to(tl.int64)
    block = (pid % blocks) * ROWS
    ids = ids_ptr + b * ids_stride_b
    t = block + tl.arange(0, ROWS)
    s = tl.arange(0, IDS)
    id_t = tl.load(ids + t.to(tl.int64) * ids_stride_t, mask=t < T, other=0).to(tl.int32)
    rank = tl.zeros((ROWS,), tl.int32)
    for first in range(0, T, IDS):
        at = ids + (first + s).to(tl.int64) * ids_stride_t
        id_s = tl.load(at, mask=first + s < T, other=_NO_ID).to(tl.int32)
        # Of equal ids, those of an earlier position come before: whole tiles of them here.
        bound = id_t + (first + IDS <= block).to(tl.int32)
        rank += tl.sum((id_s[None, :] < bound[:, None]).to(tl.int32), 1)
    s += block // IDS * IDS  # and here those of the tile that the positions are in
    id_s = tl.load(ids + s.to(tl.int64) * ids_stride_t, mask=s < T, other=_NO_ID).to(tl.int32)
    ties = (id_s[None, :] == id_t[:, None]) & (s[None, :] < t[:, None])
    rank += tl.sum(ties.to(tl.int32), 1)
    tl.store(sorted_ptr + b * T + rank, id_t, mask=t < T)
    tl.store(order_ptr + b * T + rank, t, mask=t < T)


@triton.jit
def _runs_kernel(
    G_ptr,
    ids_ptr,
    order_ptr,
    partial_ptr,
    heads_ptr,
    tails_ptr,
    T,
    d,
    chunks,
    slices,
    ids_stride_b,
    ids_stride_t,
    G_stride_b,
    G_stride_t,
    padding_idx,
    HAS_PADDING: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICE_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    chunk_of_all = (pid // slices).to(tl.int64)  # b * chunks + chunk
    b = chunk_of_all // chunks
    first = (chunk_of_all % chunks).to(tl.int32) * CHUNK
    last = min(first + CHUNK, T) - 1
    positions = first + tl.arange(0, CHUNK)
    valid = positions < T
    at = ids_ptr + b * ids_stride_b
    ids = tl.load(at + positions.to(tl.int64) * ids_stride_t, mask=valid, other=0)
    if order_ptr is None:  # all in one chunk
        rows = positions
    else:  # sorted, and contiguous
        rows = tl.load(order_ptr + b * T + positions, mask=valid, other=0)
        head_id = tl.load(at + first)
        tail_id = tl.load(at + last)
        # Does the first run go on from the chunk before, or the last into the chunk after?
        before = tl.load(at + first - 1, mask=first > 0, other=-1)
        after = tl.load(at + last + 1, mask=last + 1 < T, other=-1)
    if HAS_PADDING:
        valid = valid & (ids != padding_idx)
    # Rows that are masked here are loaded as zero, so the mask need not name them.
    same = (ids[:, None] == ids[None, :]).to(tl.float32)
    gram = tl.zeros((CHUNK, CHUNK), tl.float32)
    slice_start = (pid % slices) * SLICE_D
    for offset in range(0, SLICE_D, BLOCK_D):
        columns = slice_start + offset + tl.arange(0, BLOCK_D)
        G = tl.load(
            G_ptr + b * G_stride_b + rows.to(tl.int64)[:, None] * G_stride_t + columns[None, :],
            mask=valid[:, None] & (columns < d)[None, :],
            other=0.0,
        )
        # See gram_triton: the accumulator of the tensor cores truncates, so it starts afresh.
        product = tl.dot(G, tl.trans(G), input_precision=PRECISION, max_num_imprecise_acc=BLOCK_D)
        gram += product
        if order_ptr is not None:
            if before == head_id:
                head = tl.sum(tl.where((ids == head_id)[:, None], G.to(tl.float32), 0.0), 0)
                tl.store(heads_ptr + chunk_of_all * d + columns, head, mask=columns < d)
            if after == tail_id:
                tail = tl.sum(tl.where((ids == tail_id)[:, None], G.to(tl.float32), 0.0), 0)
                tl.store(tails_ptr + chunk_of_all * d + columns, tail, mask=columns < d)
    # A select, not a product: rows of another run may be infinite.
    kept = tl.where(same > 0, gram, 0.0)
    part = (b * (2 * chunks - 1) + chunk_of_all % chunks) * slices + pid % slices
    tl.store(partial_ptr + part, tl.sum(tl.sum(kept, 1), 0))


@triton.jit
def _boundaries_kernel(
    ids_ptr,
    heads_ptr,
    tails_ptr,
    partial_ptr,
    T,
    d,
    chunks,
    blocks,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What runs that cross boundaries add: ``2 ⟨rows before a boundary, rows of the chunk after⟩``.

    A program belongs to one boundary and has work if a run crosses it there for the first time: it
    then follows that run over all boundaries that it crosses.
    """
    pid = tl.program_id(0)
    b = (pid // (blocks * (chunks - 1))).to(tl.int64)
    rest = pid % (blocks * (chunks - 1))
    first = rest // blocks + 1
    boundary = first
    columns = (rest % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    ids = ids_ptr + b * T
    run = tl.load(ids + boundary * CHUNK - 1)
    right = tl.load(ids + boundary * CHUNK)
    before = tl.load(ids + (boundary - 1) * CHUNK - 1, mask=boundary > 1, other=-1)
    total = tl.zeros((BLOCK_D,), tl.float32)
    if (run == right) & (run != before):
        inside = columns < d
        row = b * chunks + boundary
        carried = tl.load(tails_ptr + (row - 1) * d + columns, mask=inside, other=0.0)
        end = tl.cdiv(T, CHUNK)
        while boundary < end:
            head = tl.load(heads_ptr + row * d + columns, mask=inside, other=0.0)
            total += 2.0 * carried * head
            carried += head
            boundary += 1
            row += 1
            following = tl.load(ids + boundary * CHUNK, mask=boundary < end, other=-1)
            end = tl.where(following == run, end, 0)
    part = (b * (2 * chunks - 1) + chunks - 1 + first) * blocks + rest % blocks
    tl.store(partial_ptr + part, tl.sum(total, 0))


def embedding_sqnorms(ids_BT: Tensor, G_BTd: Tensor, padding_idx: int | None) -> Tensor:
    """See :func:`flash_clipping.ops.embedding.embedding_sqnorms`."""
    G_BTd = tiles.with_unit_stride(G_BTd)
    B, T, d = G_BTd.shape
    order_BT, heads, tails = None, None, None
    chunk = CHUNK if T > UNSORTED else max(16, tiles.next_power_of_2(T))
    chunks, block_d = tiles.cdiv(T, chunk), BLOCK_BYTES // G_BTd.element_size()
    slice_d = SLICE_D if chunks > 1 else block_d
    slices = tiles.cdiv(d, slice_d)
    if chunks > 1:
        ids_BT, order_BT = _sorted(ids_BT)
        # Written, and read, only where a run crosses a boundary.
        heads, tails = G_BTd.new_empty((2, B * chunks, d), dtype=torch.float32).unbind(0)
    # One part for each slice of a chunk, and one for each slice of a boundary between two.
    partial = G_BTd.new_empty((B, 2 * chunks - 1, slices), dtype=torch.float32)
    launch(
        _runs_kernel,
        B * chunks * slices,
        G_BTd,
        ids_BT,
        order_BT,
        partial,
        heads,
        tails,
        T,
        d,
        chunks,
        slices,
        *ids_BT.stride(),
        *G_BTd.stride()[:2],
        0 if padding_idx is None else padding_idx,
        HAS_PADDING=padding_idx is not None,
        CHUNK=chunk,
        BLOCK_D=block_d,
        SLICE_D=slice_d,
        PRECISION=tiles.dot_precision(G_BTd.dtype),
        num_warps=4,
    )
    if chunks > 1:
        launch(
            _boundaries_kernel,
            B * (chunks - 1) * slices,
            ids_BT,
            heads,
            tails,
            partial,
            T,
            d,
            chunks,
            slices,
            CHUNK=CHUNK,
            BLOCK_D=slice_d,
            num_warps=4,
        )
    return partial.sum((1, 2)).clamp_(min=0)


def _sorted(ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The ids of each sample in order, and their positions.

    Stable, so that equal ids keep one order and their sums one rounding. One launch instead of
    the several of ``torch.sort``; ids have 32 bits there.
    """
    B, T = ids_BT.shape
    if T > MAX_RANKED:
        return torch.sort(ids_BT.contiguous(), dim=1, stable=True)
    sorted_BT = torch.empty((B, T), dtype=torch.int32, device=ids_BT.device)
    order_BT = torch.empty_like(sorted_BT)
    rows, ids = RANKED
    blocks = tiles.cdiv(T, rows)
    launch(
        _rank_kernel,
        B * blocks,
        ids_BT,
        sorted_BT,
        order_BT,
        T,
        blocks,
        *ids_BT.stride(),
        ROWS=rows,
        IDS=ids,
        num_warps=4,
    )
    return sorted_BT, order_BT


@triton.jit
def _tied_kernel(
    ids_ptr,
    Gemb_ptr,
    Ahead_ptr,
    Ghead_ptr,
    partial_ptr,
    T,
    S,
    d,
    V,
    Gemb_stride_b,
    Gemb_stride_t,
    Ahead_stride_b,
    Ahead_stride_s,
    Ghead_stride_b,
    Ghead_stride_s,
    t_blocks,
    s_blocks,
    padding_idx,
    HAS_PADDING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    b = pid // (t_blocks * s_blocks)
    rest = pid % (t_blocks * s_blocks)
    t0 = (rest // s_blocks) * BLOCK_T
    s0 = (rest % s_blocks) * BLOCK_S
    products = tl.zeros((BLOCK_S, BLOCK_T), tl.float32)
    for k in range(0, d, BLOCK_D):
        a = tiles.load_tile(
            Ahead_ptr, b, s0, k, S, d, Ahead_stride_b, Ahead_stride_s, BLOCK_S, BLOCK_D, False
        )
        g = tiles.load_tile(
            Gemb_ptr, b, t0, k, T, d, Gemb_stride_b, Gemb_stride_t, BLOCK_T, BLOCK_D, False
        )
        # See gram_triton: the accumulator of the tensor cores truncates, so it starts afresh.
        products += tl.dot(a, tl.trans(g), input_precision=PRECISION, max_num_imprecise_acc=BLOCK_D)
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
    kept = tl.where(inside, products * weights.to(tl.float32), 0.0)
    tl.store(partial_ptr + pid, tl.sum(tl.sum(kept, 1), 0))


def tied_cross_term(
    ids_BT: Tensor,
    Gemb_BTd: Tensor,
    Ahead_BSd: Tensor,
    Ghead_BSV: Tensor,
    padding_idx: int | None,
) -> Tensor:
    """See :func:`flash_clipping.ops.embedding.tied_cross_term`."""
    Gemb_BTd, Ahead_BSd = tiles.with_unit_stride(Gemb_BTd), tiles.with_unit_stride(Ahead_BSd)
    Ghead_BSV = tiles.with_unit_stride(Ghead_BSV)
    if Gemb_BTd.dtype != Ahead_BSd.dtype:
        common = torch.promote_types(Gemb_BTd.dtype, Ahead_BSd.dtype)
        Gemb_BTd, Ahead_BSd = Gemb_BTd.to(common), Ahead_BSd.to(common)
    B, T, d = Gemb_BTd.shape
    S, V = Ghead_BSV.shape[1:]
    if S == 0:
        return torch.zeros(B, dtype=torch.float32, device=Gemb_BTd.device)
    block, block_d = 64, 32 if Gemb_BTd.element_size() == 4 else 64
    t_blocks, s_blocks = tiles.cdiv(T, block), tiles.cdiv(S, block)
    partial = torch.empty((B, t_blocks * s_blocks), dtype=torch.float32, device=Gemb_BTd.device)
    launch(
        _tied_kernel,
        partial.numel(),
        ids_BT.contiguous(),
        Gemb_BTd,
        Ahead_BSd,
        Ghead_BSV,
        partial,
        T,
        S,
        d,
        V,
        *Gemb_BTd.stride()[:2],
        *Ahead_BSd.stride()[:2],
        *Ghead_BSV.stride()[:2],
        t_blocks,
        s_blocks,
        0 if padding_idx is None else padding_idx,
        HAS_PADDING=padding_idx is not None,
        BLOCK_T=block,
        BLOCK_S=block,
        BLOCK_D=block_d,
        PRECISION=tiles.dot_precision(Gemb_BTd.dtype),
        num_warps=4,
        num_stages=3,
    )
    return partial.sum(1)
