"""Per-sample norms and clipped sums of an embedding table.

B samples, T positions, S head positions, d embedding features, V vocabulary entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_clipping._compat import sums_of_bags
from flash_clipping.errors import InvalidValue
from flash_clipping.ops.embedding import reference
from flash_clipping.ops.error_bounds import APART, TOGETHER
from flash_clipping.ops.rows import row_scale
from flash_clipping.ops.runtime import backend as backends
from flash_clipping.ops.runtime.shapes import as_rows, check_coefficients

UNSORTED = 128
"""Positions of a sample up to which a kernel takes them in any order, in one launch."""
LONG_RUN = 64
"""Positions that a row of the table has on average from which on one-hot vectors are faster."""


def adds_up_runs(T: int, d: int, num_embeddings: int | None, padding_idx: int | None) -> bool:
    """Whether rows of one id are added up one after the other on a GPU, not by tensor cores."""
    rows = T if num_embeddings is None else num_embeddings
    # The vectors are to be small beside G; and a row of padding may hold anything: times a zero it
    # would not always be one.
    is_linear = rows * LONG_RUN <= min(T, 4 * d) and padding_idx is None
    return T > UNSORTED and not is_linear


def embedding_sqnorms(
    ids: Tensor,
    G: Tensor,
    *,
    padding_idx: int | None = None,
    num_embeddings: int | None = None,
    in_parts: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Squared norms of the per-sample gradients of an embedding table.

    ``‖g_b‖² = Σ_{t,t'} [id_t = id_t'] ⟨G_t, G_t'⟩``. The ids of long samples are sorted and the
    gradients of equal ids summed. ``G`` is read once (for tables of a few rows, once for every 128
    of them). No buffer of the table's size, no wait for the device, bitwise equal from run to run.

    Args:
        ids: ``[B, ...]`` indices, not negative and below ``2**31 - 1``.
        G: ``[B, ..., d]`` gradient of the looked-up rows.
        padding_idx: the row that gets no gradient, as in ``nn.Embedding``.
        num_embeddings: rows of the table, where known: for tables of a few rows (token types)
            there is a faster way.
        in_parts: leave the squared norms as parts ``[B, n]`` that are still to be added up.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        ``[B]``, fp32 (float64 for float64).

    Raises:
        ValueError: ``ids`` and ``G`` that do not belong together, or a table of 2**31 rows.
    """
    if num_embeddings is not None and num_embeddings >= 2**31:
        raise InvalidValue(
            f"FC304 num_embeddings is {num_embeddings}; norms are for tables of fewer than 2**31 "
            "rows. Split the table."
        )
    ids_BT, G_BTd = _as_positions(ids, G)
    parts_Bn = backends.run(
        reference.embedding_sqnorms, backend, G_BTd, ids_BT, G_BTd, padding_idx, num_embeddings
    )
    return parts_Bn if in_parts else parts_Bn.sum(1)


def embedding_clipped_sum(
    ids: Tensor,
    G: Tensor,
    coef_B: Tensor,
    num_embeddings: int,
    *,
    padding_idx: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """``Σ_b coef_b g_b`` of an embedding table, ``[V, d]`` in fp32 (float64 for float64).

    The table's gradient is what the non-private step computes anyway, and PyTorch's kernel for it
    adds in a fixed order. More than a few positions are added up in two levels
    (:func:`flash_clipping.ops.error_bounds.additions`). Blocks of the first have positions of one
    sample if it is long: what rounding makes of them does not depend on others.
    """
    ids_BT, G_BTd = _as_positions(ids, G)
    check_coefficients(coef_B, G_BTd, "G")
    rows = row_scale(G_BTd, coef_B, backend=backend)
    (B, T), places = ids_BT.shape, num_embeddings
    if T > APART or B * T > 2 * TOGETHER:
        here_BT = torch.arange(B * T, device=ids_BT.device).view(B, T)
        if T > APART:
            here_BT = here_BT // T * (-(-T // TOGETHER) * TOGETHER) + here_BT % T
        keys_N = (here_BT // TOGETHER * num_embeddings + ids_BT).flatten()
        sorted_N, order_N = keys_N.sort(stable=True)
        block_N, keys_N = _blocks(order_N == order_N[0], sorted_N, B * T)
        block_N = torch.empty_like(block_N).index_copy_(0, order_N, block_N)
        rows = reference.sums_by_index(rows.flatten(0, 1), block_N, B * T)
        # Zeros of one id more, which is no id. (PyTorch's kernel for a GPU has room for as many.)
        ids_BT = torch.where(keys_N < 0, num_embeddings, keys_N % num_embeddings)
        places += 1
    table: Tensor = torch.ops.aten.embedding_dense_backward(
        rows, ids_BT, places, -1 if padding_idx is None else padding_idx, False
    )
    return table[:num_embeddings]


def sums_of_weighted_rows(
    ids_N: Tensor, bags_N: Tensor, weights_N: Tensor, X_Md: Tensor, table: int
) -> Tensor:
    """``[table, d]``: ``Σ weights_n X_bag(n)`` over the n of each id, of fp32 or float64, in two
    levels."""
    N = len(ids_N)
    if N <= 2 * TOGETHER:
        return sums_of_bags(ids_N, bags_N, weights_N, X_Md, table)
    sorted_N, order_N = ids_N.sort(stable=True)
    blocks = min(N, table + -(-N // TOGETHER))
    starts_N = torch.arange(N, device=ids_N.device) % TOGETHER == 0
    block_N, ids_S = _blocks(starts_N, sorted_N, blocks)
    sums_Sd = sums_of_bags(block_N, bags_N[order_N], weights_N[order_N], X_Md, blocks)
    return reference.sums_by_index(sums_Sd, ids_S.masked_fill(ids_S < 0, table), table + 1)[:table]


def _blocks(starts_N: Tensor, keys_N: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The block of every key, of sorted ones, and the keys of blocks, ``[count]``: -1 for none.
    Blocks begin where ``starts_N`` is 1, and where keys change."""
    starts_N[1:] |= keys_N[1:] != keys_N[:-1]
    block_N = starts_N.cumsum(0) - 1
    # One and the same key in a block.
    return block_N, keys_N.new_full((count,), -1).index_copy_(0, block_N, keys_N)


def tied_cross_term(
    ids: Tensor,
    Gemb: Tensor,
    Ahead: Tensor,
    Ghead: Tensor,
    *,
    padding_idx: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``⟨g_b^embedding, g_b^head⟩`` for a table that is also the output head's weight.

    ``Σ_{t,s} Ghead[s, id_t] ⟨Gemb[t], Ahead[s]⟩``. Twice this is what the squared norm of the tied
    parameter has beyond the sum of its two uses.

    Args:
        ids: ``[B, ...]`` indices; ``Gemb``: ``[B, ..., d]`` gradient of the looked-up rows.
        Ahead: ``[B, ..., d]`` input of the head; ``Ghead``: ``[B, ..., V]`` its output gradient.
        padding_idx: the row to which the embedding adds no gradient.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        ``[B]``, and by how much at most it is off for rounding, ``[B]`` (0 where it was added up in
        float64); fp32 (float64 for float64).
    """
    ids_BT, Gemb_BTd = _as_positions(ids, Gemb)
    Ahead_BSd, Ghead_BSV = as_rows(Ahead, "Ahead"), as_rows(Ghead, "Ghead")
    B, S, d = Ahead_BSd.shape
    if Ghead_BSV.shape[:2] != (B, S) or (len(Gemb_BTd), Gemb_BTd.shape[2]) != (B, d):
        raise InvalidValue(
            f"FC303 Gemb has shape {tuple(Gemb.shape)}, Ahead {tuple(Ahead.shape)} and Ghead "
            f"{tuple(Ghead.shape)}; samples must agree, positions of Ahead and Ghead, and the "
            "features of Gemb and Ahead: a tied weight has one width."
        )
    operands = ids_BT, Gemb_BTd, Ahead_BSd, Ghead_BSV
    return backends.run(reference.tied_cross_term, backend, Gemb_BTd, *operands, padding_idx)


def _as_positions(ids: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    if ids.shape != G.shape[:-1]:
        raise InvalidValue(
            f"FC303 ids has shape {tuple(ids.shape)} and G {tuple(G.shape)}; G must have ids' "
            "shape and one feature dimension."
        )
    ids_BT = ids.unsqueeze(1) if ids.dim() == 1 else ids.flatten(1)
    return ids_BT, as_rows(G, "G")
