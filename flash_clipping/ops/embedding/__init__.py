"""Per-sample norms and clipped sums of an embedding table.

B samples, T positions, S head positions, d embedding features, V vocabulary entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_clipping.errors import InvalidValue
from flash_clipping.ops.embedding import reference
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

    ``‖g_b‖² = Σ_{t,t'} [id_t = id_t'] ⟨G_t, G_t'⟩``: the ids of long samples are sorted and the
    gradients of equal ids summed. ``G`` is read once (for tables of a few rows, once for every 128
    of them); no buffer of the table's size; no wait for the device; bitwise equal from run to run.

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
            f"num_embeddings is {num_embeddings}; norms are for tables of fewer than 2**31 rows. "
            "Split the table."
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
    adds in a fixed order. Of samples that are longer than :data:`UNSORTED` rows of one id are added
    up before they meet those of others: what rounding makes of them may not depend on these.
    """
    ids_BT, G_BTd = _as_positions(ids, G)
    check_coefficients(coef_B, G_BTd, "G")
    rows = row_scale(G_BTd, coef_B, backend=backend)
    places = num_embeddings
    if ids_BT.shape[1] > UNSORTED and len(ids_BT) > 1:
        rows, ids_BT = _sums_of_runs(rows.flatten(0, 1), ids_BT, num_embeddings)
        places += 1
    table: Tensor = torch.ops.aten.embedding_dense_backward(
        rows, ids_BT, places, -1 if padding_idx is None else padding_idx, False
    )
    return table[:num_embeddings]


def _sums_of_runs(rows_Nd: Tensor, ids_BT: Tensor, num_embeddings: int) -> tuple[Tensor, Tensor]:
    """Rows of one sample and one id added up, ``[N, d]``, and the ids of these sums, ``[N]``; as
    many as there are fewer than N are zeros of the id ``num_embeddings``. (PyTorch's kernel for a
    GPU has room for as many ids as a table has rows: one more, to be skipped, is no id.)"""
    samples_B1 = torch.arange(len(ids_BT), device=ids_BT.device).unsqueeze(1)
    keys_N, order_N = (ids_BT + samples_B1 * num_embeddings).flatten().sort(stable=True)
    run_N = torch.zeros_like(keys_N)
    run_N[1:] = (keys_N[1:] != keys_N[:-1]).cumsum(0)
    run_of_row_N = torch.empty_like(run_N).index_copy_(0, order_N, run_N)
    ids_N = torch.full_like(keys_N, num_embeddings)
    ids_N.index_copy_(0, run_N, keys_N.remainder_(num_embeddings))  # one and the same in a run
    return reference.sums_by_index(rows_Nd, run_of_row_N, len(run_N)), ids_N


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
            f"Gemb has shape {tuple(Gemb.shape)}, Ahead {tuple(Ahead.shape)} and Ghead "
            f"{tuple(Ghead.shape)}; samples must agree, positions of Ahead and Ghead, and the "
            "features of Gemb and Ahead: a tied weight has one width."
        )
    operands = ids_BT, Gemb_BTd, Ahead_BSd, Ghead_BSV
    return backends.run(reference.tied_cross_term, backend, Gemb_BTd, *operands, padding_idx)


def _as_positions(ids: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    if ids.shape != G.shape[:-1]:
        raise InvalidValue(
            f"ids has shape {tuple(ids.shape)} and G {tuple(G.shape)}; G must have ids' shape and "
            "one feature dimension."
        )
    ids_BT = ids.unsqueeze(1) if ids.dim() == 1 else ids.flatten(1)
    return ids_BT, as_rows(G, "G")
