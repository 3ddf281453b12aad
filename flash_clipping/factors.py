"""What a per-sample gradient is made of.

A per-sample gradient ``[B, *parameter]`` is almost never worth forming: the norm of every sample
and the clipped sum over samples follow from its factors. Rules return factors where autograd's own
backward would return the gradient summed over the batch; the tape merges them per parameter, asks
for norms, and then for clipped sums.

Shape suffixes: ``B`` samples, ``T`` positions, ``d`` input features, ``p`` output features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_clipping.ops import cost
from flash_clipping.ops.backend import full_precision
from flash_clipping.ops.clipped_sum import clipped_sums
from flash_clipping.ops.embedding import (
    embedding_clipped_sum,
    embedding_sqnorms,
    tied_cross_term,
)
from flash_clipping.ops.embedding_torch import sums_by_index
from flash_clipping.ops.linear import linear_sqnorms
from flash_clipping.ops.outer import outer_grads, outer_sqnorms, weighted_sum
from flash_clipping.ops.row_scale import row_scale
from flash_clipping.ops.row_sum import row_sums
from flash_clipping.ops.shapes import Memo, Normalized


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64; everything narrower is accumulated in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _parts(rows: int, samples: int) -> int:
    """Rows that make up one sample; 1 in an empty batch."""
    return rows // samples if samples else 1


class Factor(ABC):
    """A per-sample gradient of one parameter, in whatever form is cheapest to keep."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Number of samples ``B``."""

    @abstractmethod
    def sqnorms(self, backend: str) -> Tensor:
        """Squared norm of every sample's gradient: fp32 (or fp64) ``[B]``."""

    @abstractmethod
    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        """``sum_b coef_b g_b``, shaped like the parameter; ``None`` means all ones.

        A sample whose coefficient is 0 adds exactly nothing, whatever its gradient holds.
        """

    @abstractmethod
    def dense(self) -> Tensor:
        """The per-sample gradients themselves, ``[B, *parameter]``."""

    def may_be_stored(self) -> bool:
        """Whether memory may allow :meth:`stored`: asked of every layer, so answered quickly."""
        return False

    def is_worth_storing(self, readers: int) -> bool:
        """Whether forming the per-sample gradients now is cheapest and takes no more memory.

        ``readers`` is how many layers read the same input.
        """
        return False

    def stored(self, backend: str) -> Dense:
        """The per-sample gradients, formed now, in place of what they are made of."""
        return Dense(self.dense())

    def operands(self) -> tuple[Any, ...]:
        """What decides, besides its type, how it is handled together with others: tensors by
        their layout, anything else by its value (:mod:`flash_clipping.plan`)."""
        return (self.batch_size,)

    @classmethod
    def concatenate(cls, factors: Sequence[Any]) -> Factor:
        """One factor for several uses of a parameter within a sample."""
        return Dense.sum_of(factors)

    def fold(self, samples: int) -> Factor:
        """The same for ``samples`` samples, each made of ``B / samples`` rows that lie together."""
        grads = self.dense()
        parts = _parts(len(grads), samples)
        return Dense(grads.reshape(samples, parts, *grads.shape[1:]).sum(1))


class Dense(Factor):
    """Per-sample gradients that are small enough to keep as they are: ``[B, *parameter]``."""

    def __init__(self, grads: Tensor, sq_parts_Bn: Tensor | None = None):
        self.grads = grads
        #: Squared norms in parts that are still to be added up, where they are known already.
        self.sq_parts_Bn = sq_parts_Bn

    @property
    def batch_size(self) -> int:
        return self.grads.shape[0]

    def operands(self) -> tuple[Any, ...]:
        return self.grads, self.sq_parts_Bn

    #: Per-sample gradients of up to this many elements are handled many at a time.
    SMALL = 1 << 17

    @property
    def is_small(self) -> bool:
        return self.grads.numel() <= self.SMALL * max(1, self.batch_size)

    def sqnorms(self, backend: str) -> Tensor:
        if self.sq_parts_Bn is None:
            flat = self.grads.reshape(self.batch_size, self.grads[:1].numel() or 1)
            # vector_norm reduces in the wider dtype without writing a converted copy.
            norm_B = torch.linalg.vector_norm(
                flat, dim=1, dtype=accumulation_dtype(self.grads.dtype)
            )
            self.sq_parts_Bn = norm_B.square().unsqueeze(1)
        return self.sq_parts_Bn.sum(1)

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        if coef_B is None:
            return self.grads.sum(0)
        return weighted_sum(self.grads, coef_B, backend=backend)

    def dense(self) -> Tensor:
        return self.grads

    @classmethod
    def sum_of(cls, factors: Sequence[Factor]) -> Dense:
        """Any factors of one parameter, formed and added."""
        return cls(torch.stack([factor.dense() for factor in factors]).sum(0))


class RowSum(Factor):
    """``g_b = sum_t rows_bt``: a bias, or a scale whose gradient came in few partial sums, or one.

    With ``normalized``, ``g_b = sum_t rows_bt xhat_bt``: a scale, from the output gradient itself.
    Added up when the norms are taken, one launch for many, rather than one by one.
    """

    def __init__(
        self,
        rows_BTn: Tensor,
        shape: Sequence[int] | None = None,
        normalized: Normalized | None = None,
    ):
        self.rows_BTn = rows_BTn
        #: Of the parameter, where that has several axes.
        self.shape = None if shape is None else tuple(shape)
        self.normalized = normalized

    @property
    def batch_size(self) -> int:
        return self.rows_BTn.shape[0]

    def operands(self) -> tuple[Any, ...]:
        if self.normalized is None:
            return (self.rows_BTn,)
        return self.rows_BTn, *self.normalized

    def sqnorms(self, backend: str) -> Tensor:
        return Dense(self._grads(backend)).sqnorms(backend)

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        return Dense(self._grads(backend)).clipped_sum(coef_B, backend)

    def dense(self) -> Tensor:
        return self._grads("auto")

    def _grads(self, backend: str) -> Tensor:
        rows_BTn = self.rows_BTn
        if self.normalized is not None:
            grads, _ = row_sums([rows_BTn], [self.normalized], backend=backend)
        else:
            grads = rows_BTn.sum(1, dtype=accumulation_dtype(rows_BTn.dtype))
        return grads if self.shape is None else grads.view(-1, *self.shape)

    def fold(self, samples: int) -> Factor:
        if self.normalized is not None:
            return super().fold(samples)
        rows_BTn = self.rows_BTn
        B, T, n = rows_BTn.shape
        return RowSum(rows_BTn.reshape(samples, _parts(B, samples) * T, n), self.shape)

    @classmethod
    def concatenate(cls, factors: Sequence[RowSum]) -> Factor:
        if any(factor.normalized is not None for factor in factors):
            return Dense.sum_of(factors)
        rows_BTn = torch.cat([factor.rows_BTn for factor in factors], dim=1)
        return cls(rows_BTn, factors[0].shape)


class VectorStack:
    """Small per-sample gradients, side by side, and their squared norms.

    A model has a bias and a norm layer for every few matrices; one by one, their launches take
    longer than their arithmetic. Shape suffix ``P``: parameters; ``n``: elements of one of them,
    ``N`` of all.
    """

    def __init__(self, keys: list[int], sizes: list[int], grads_BN: Tensor, sq_PB: Tensor):
        self.keys = keys
        self.sizes = sizes
        self.grads_BN = grads_BN
        self.sq_PB = sq_PB

    @classmethod
    def of_dense(cls, keys: list[int], factors: Sequence[Dense]) -> VectorStack:
        """Of gradients of one size and dtype."""
        # Not flatten(1): a scalar parameter's gradients have no second axis.
        flat = [f.grads.reshape(f.batch_size, f.grads.shape[1:].numel()) for f in factors]
        grads_BPn = torch.stack(flat, dim=1)
        B, P, n = grads_BPn.shape
        dtype = accumulation_dtype(grads_BPn.dtype)
        norms_BP = torch.linalg.vector_norm(grads_BPn, dim=2, dtype=dtype)
        return cls(keys, [n] * P, grads_BPn.view(B, P * n), norms_BP.square_().T)

    @classmethod
    def of_sums(
        cls, keys: list[int], factors: Sequence[RowSum], backend: str, memo: Memo | None = None
    ) -> VectorStack:
        """Of sums over as many positions and in one dtype, of any sizes."""
        rows = [factor.rows_BTn for factor in factors]
        x_hats = [factor.normalized for factor in factors]
        grads_BN, sq_PB = row_sums(rows, x_hats, backend=backend, memo=memo)
        return cls(keys, [x.shape[2] for x in rows], grads_BN, sq_PB)

    def clipped_sums(
        self, coefs: Sequence[Tensor], dtype: torch.dtype, backend: str
    ) -> Sequence[Tensor]:
        """One clipped sum ``[n]`` per parameter, in order and in the parameters' dtype."""
        if all(coef is coefs[0] for coef in coefs):
            sums_N = weighted_sum(self.grads_BN, coefs[0], backend=backend)
            return sums_N.to(dtype).split(self.sizes)
        columns = zip(self.grads_BN.split(self.sizes, 1), coefs, strict=True)
        return [weighted_sum(column, coef, backend=backend).to(dtype) for column, coef in columns]


class Outer(Factor):
    """``g_b = G_b^T A_b`` (``p x d``): a linear map with input ``A`` and output gradient ``G``."""

    def __init__(self, A_BTd: Tensor, G_BTp: Tensor):
        self.A_BTd = A_BTd
        self.G_BTp = G_BTp

    @property
    def batch_size(self) -> int:
        return self.G_BTp.shape[0]

    def operands(self) -> tuple[Any, ...]:
        return self.A_BTd, self.G_BTp

    def shares_input_with(self) -> tuple[Any, ...]:
        """A key that is equal for factors that read the same memory."""
        A = self.A_BTd
        return (A.data_ptr(), A.shape, A.stride(), A.dtype, A.device)

    def sqnorms(self, backend: str) -> Tensor:
        return linear_sqnorms([(self.A_BTd, [self.G_BTp])], backend=backend)[0][0]

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        if coef_B is None:
            return self.G_BTp.flatten(0, 1).mT @ self.A_BTd.flatten(0, 1)
        return clipped_sums(self.A_BTd, [self.G_BTp], coef_B, backend=backend)[0]

    def dense(self) -> Tensor:
        return self.G_BTp.mT @ self.A_BTd

    def fold(self, samples: int) -> Factor:
        A, G = self.A_BTd, self.G_BTp
        T = _parts(len(A), samples) * A.shape[1]
        return Outer(A.reshape(samples, T, A.shape[2]), G.reshape(samples, T, G.shape[2]))

    def may_be_stored(self) -> bool:
        if type(self) is not Outer:  # it may have its own way with norms and sums
            return False
        shape = self.A_BTd.shape
        if len(shape) != 3:  # refused, with the layer's path, when norms are taken
            return False
        return cost.may_hold_gradients(shape[1], shape[2], self.G_BTp.shape[-1])

    def is_worth_storing(self, readers: int) -> bool:
        if not self.may_be_stored():
            return False
        G = self.G_BTp
        B, T, d = self.A_BTd.shape
        p = G.shape[-1]
        if not cost.may_hold_gradients(T, d, p, readers):
            return False
        algorithm = cost.choose_on(
            G.device.type, B, T, d, p, G.element_size(), may_store=True, shared=readers
        )
        return algorithm == "outer_store"

    def stored(self, backend: str) -> Dense:
        """Form the per-sample gradients once, and let go of ``A`` and ``G``."""
        if self.G_BTp.is_cuda and self.A_BTd.shape[2] * self.G_BTp.shape[2] <= Dense.SMALL:
            # Their norms are taken with those of all other small ones.
            return Dense(outer_grads(self.A_BTd, self.G_BTp))
        parts_Bn, grads_Bpd = outer_sqnorms(
            self.A_BTd, self.G_BTp, store=True, in_parts=True, backend=backend
        )
        assert grads_Bpd is not None
        return Dense(grads_Bpd, parts_Bn)

    @classmethod
    def concatenate(cls, factors: Sequence[Outer]) -> Factor:
        return cls(
            torch.cat([factor.A_BTd for factor in factors], dim=1),
            torch.cat([factor.G_BTp for factor in factors], dim=1),
        )


class Lookup(Factor):
    """An embedding: row ``id_t`` of the gradient receives ``G_t``."""

    def __init__(
        self, ids_BT: Tensor, G_BTd: Tensor, num_embeddings: int, padding_idx: int | None = None
    ):
        self.ids_BT = ids_BT
        self.G_BTd = G_BTd
        self.num_embeddings = num_embeddings
        self.padding_idx = padding_idx

    @property
    def batch_size(self) -> int:
        return self.G_BTd.shape[0]

    def sqnorms(self, backend: str) -> Tensor:
        return embedding_sqnorms(
            self.ids_BT, self.G_BTd, padding_idx=self.padding_idx, backend=backend
        )

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        if coef_B is None:
            padding_idx = -1 if self.padding_idx is None else self.padding_idx
            return torch.ops.aten.embedding_dense_backward(
                self.G_BTd, self.ids_BT, self.num_embeddings, padding_idx, False
            )
        return embedding_clipped_sum(
            self.ids_BT,
            self.G_BTd,
            coef_B,
            self.num_embeddings,
            padding_idx=self.padding_idx,
            backend=backend,
        )

    def dense(self) -> Tensor:
        B, _, d = self.G_BTd.shape
        samples_B1 = torch.arange(B, device=self.ids_BT.device)[:, None]
        G_BTd = self.G_BTd
        if self.padding_idx is not None:
            G_BTd = G_BTd * (self.ids_BT != self.padding_idx).unsqueeze(-1)
        V = self.num_embeddings
        return sums_by_index(G_BTd, self.ids_BT + samples_B1 * V, B * V).view(B, V, d)

    @classmethod
    def concatenate(cls, factors: Sequence[Lookup]) -> Factor:
        first = factors[0]
        if any(factor.padding_idx != first.padding_idx for factor in factors):
            return super().concatenate(factors)
        return cls(
            torch.cat([factor.ids_BT for factor in factors], dim=1),
            torch.cat([factor.G_BTd for factor in factors], dim=1),
            first.num_embeddings,
            first.padding_idx,
        )


class Bag(Factor):
    """An embedding bag: row ``id_n`` of sample ``bag_n`` receives ``weight_n G_bag``.

    All ids of one bag receive multiples of one vector, so that
    ``||g_b||^2 = ||G_b||^2 sum_id (sum of the weights of id in bag b)^2``. ``N`` counts the ids of
    all bags.
    """

    def __init__(
        self, bags_N: Tensor, ids_N: Tensor, weights_N: Tensor, G_Bd: Tensor, num_embeddings: int
    ):
        self.bags_N = bags_N
        self.ids_N = ids_N
        self.weights_N = weights_N
        self.G_Bd = G_Bd
        self.num_embeddings = num_embeddings

    @property
    def batch_size(self) -> int:
        return self.G_Bd.shape[0]

    def sqnorms(self, backend: str) -> Tensor:
        dtype = accumulation_dtype(self.G_Bd.dtype)
        # Runs of equal (bag, id), added up in a fixed order.
        keys_N, order_N = (self.bags_N * self.num_embeddings + self.ids_N).sort(stable=True)
        run_N = torch.ones_like(keys_N).cumsum(0) - 1
        if keys_N.numel():
            run_N = torch.cat([run_N[:1], (keys_N[1:] != keys_N[:-1]).long().cumsum(0)])
        weights_N1 = self.weights_N[order_N].to(dtype).unsqueeze(1)
        sums_N1 = sums_by_index(weights_N1, run_N, len(run_N))
        bag_N = torch.zeros_like(keys_N).index_put((run_N,), self.bags_N[order_N])
        multiplicity_B = sums_by_index(sums_N1.square(), bag_N, self.batch_size).squeeze(1)
        norm_B = torch.linalg.vector_norm(self.G_Bd, dim=1, dtype=dtype)
        return norm_B.square() * multiplicity_B

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        G_Bd = self.G_Bd
        if coef_B is not None:
            G_Bd = row_scale(G_Bd, coef_B, backend=backend)
        G_Nd = G_Bd[self.bags_N] * self.weights_N[:, None]
        return torch.ops.aten.embedding_dense_backward(
            G_Nd, self.ids_N, self.num_embeddings, -1, False
        )

    def dense(self) -> Tensor:
        G_Nd = self.G_Bd[self.bags_N] * self.weights_N[:, None]
        (B, d), V = self.G_Bd.shape, self.num_embeddings
        return sums_by_index(G_Nd, self.bags_N * V + self.ids_N, B * V).view(B, V, d)


class Stacked(Factor):
    """A parameter whose leading axis is made of parts, each with a gradient of its own.

    ``nn.MultiheadAttention`` keeps the projections of query, key and value in one matrix.
    """

    def __init__(self, parts: Sequence[Factor]):
        self.parts = list(parts)

    @property
    def batch_size(self) -> int:
        return self.parts[0].batch_size

    def sqnorms(self, backend: str) -> Tensor:
        return torch.stack([part.sqnorms(backend) for part in self.parts]).sum(0)

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        return torch.cat([part.clipped_sum(coef_B, backend) for part in self.parts])

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts], dim=1)


class TiedEmbedding(Factor):
    """One matrix read as an embedding and applied as a linear map (GPT-2's head)."""

    def __init__(self, lookup: Lookup, head: Outer):
        self.lookup = lookup
        self.head = head

    @property
    def batch_size(self) -> int:
        return self.head.batch_size

    def sqnorms(self, backend: str) -> Tensor:
        cross_B = tied_cross_term(
            self.lookup.ids_BT,
            self.lookup.G_BTd,
            self.head.A_BTd,
            self.head.G_BTp,
            padding_idx=self.lookup.padding_idx,
            backend=backend,
        )
        # The sum of a square cannot be negative; its three rounded terms can.
        total_B = self.lookup.sqnorms(backend) + self.head.sqnorms(backend) + 2 * cross_B
        return total_B.clamp(min=0)  # clamp keeps NaN: a poisoned sample stays visible

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        return self.head.clipped_sum(coef_B, backend) + self.lookup.clipped_sum(coef_B, backend)

    def dense(self) -> Tensor:
        return self.lookup.dense() + self.head.dense()


class Convolution(Factor):
    """A convolution: ``g_b`` is an outer product of unfolded input patches and ``G``.

    The unfolded input is ``prod(kernel_size)`` times the input, so it is formed for a few samples
    at a time, used, and dropped. Either that gives the norms alone, and the clipped sum is one
    ordinary convolution backward on the scaled output gradient; or it gives the per-sample
    gradients, where they take no more memory than the ``x`` and ``G`` that they replace.
    """

    # Elements of unfolded input alive at once, unless one sample alone has more: few launches on
    # a GPU, what fits into a cache on a CPU.
    CHUNK_ELEMENTS = 1 << 24
    CHUNK_ELEMENTS_CPU = 1 << 18

    # Elements that oneDNN lays out anew for one call: less than it does for a whole batch.
    COPIED_ELEMENTS = 1 << 20

    def __init__(
        self,
        x: Tensor,
        G: Tensor,
        weight: Tensor,
        stride: tuple[int, ...],
        padding: Sequence[int],
        dilation: tuple[int, ...],
        groups: int,
    ):
        # x is [B, C, *spatial], padding is zeros on both sides; weight gives shape only.
        self.x = x
        self.G = G
        self.weight_shape = weight.shape
        self.stride = stride
        self.padding = list(padding)
        self.dilation = dilation
        self.groups = groups

    @property
    def batch_size(self) -> int:
        return self.G.shape[0]

    @property
    def _positions(self) -> int:
        return self.G.shape[2:].numel()

    def _chunks(self) -> list[slice]:
        elements = self.CHUNK_ELEMENTS_CPU if self.x.device.type == "cpu" else self.CHUNK_ELEMENTS
        per_sample = self._positions * self.x.shape[1] * self.weight_shape[2:].numel()
        step = max(1, elements // max(1, per_sample))
        return [slice(i, i + step) for i in range(0, self.batch_size, step)]

    def _outer(self, rows: slice) -> Outer:
        """The chunk as a linear map, each group a sample of its own: ``[B * groups, T, .]``."""
        x, G = self.x[rows], self.G[rows]
        spatial = x.dim() - 2
        if any(self.padding):
            x = F.pad(x, [pad for pad in reversed(self.padding) for _ in range(2)])
        patches = x
        for axis in range(spatial):
            span = (self.weight_shape[2 + axis] - 1) * self.dilation[axis] + 1
            patches = patches.unfold(2 + axis, span, self.stride[axis])
        every = [slice(None)] * (2 + spatial) + [slice(None, None, n) for n in self.dilation]
        patches = patches[tuple(every)]  # [B, C, *out, *kernel]
        n, positions = G.shape[0], self._positions
        d = self.weight_shape[1:].numel()
        if x.device.type == "cpu":
            # Copied along the positions, which lie together in x: several times as fast.
            out = tuple(range(2, 2 + spatial))
            kernel = tuple(range(2 + spatial, 2 + 2 * spatial))
            A = patches.permute(0, 1, *kernel, *out).reshape(n * self.groups, d, positions).mT
        else:  # [B, groups, *out, C / groups, *kernel]
            patches = patches.unflatten(1, (self.groups, -1)).movedim(2, 2 + spatial)
            A = patches.reshape(n * self.groups, positions, d)
        channels = self.weight_shape[0] // self.groups
        return Outer(A, G.reshape(n * self.groups, channels, positions).mT)

    def sqnorms(self, backend: str) -> Tensor:
        if self.batch_size == 0:
            return self.G.new_zeros(0, dtype=accumulation_dtype(self.G.dtype))
        parts = [self._outer(rows).sqnorms(backend) for rows in self._chunks()]
        return torch.cat(parts).view(self.batch_size, self.groups).sum(1)

    def may_be_stored(self) -> bool:
        return type(self) is Convolution  # another may have its own way with norms and sums

    def is_worth_storing(self, readers: int) -> bool:
        """Measured on CPUs only, where unfolding costs as much as the product that follows."""
        if not self.may_be_stored():
            return False
        x, G, groups = self.x, self.G, self.groups
        if x.device.type != "cpu" or x.dtype != G.dtype or not self.batch_size:
            return False
        replaced = x[0].numel() + G[0].numel()  # the patches themselves are not kept
        if self.weight_shape.numel() > cost.STORE_BUDGET * replaced:
            return False
        d, p = self.weight_shape[1:].numel(), self.weight_shape[0] // groups
        B, T, itemsize = self.batch_size * groups, self._positions, G.element_size()
        return cost.choose_on("cpu", B, T, d, p, itemsize, may_store=True) == "outer_store"

    def stored(self, backend: str) -> Dense:
        """Form the per-sample gradients once, and let go of ``x`` and ``G``."""
        with torch.no_grad(), full_precision(self.G.device):
            grads = self._by_groups() if self._groups_are_fast() else self._by_patches()
            norm_B = torch.linalg.vector_norm(
                grads.flatten(1), dim=1, dtype=accumulation_dtype(grads.dtype)
            )
        return Dense(grads, norm_B.square_().unsqueeze(1))

    def _groups_are_fast(self) -> bool:
        """Whether oneDNN is there, whose kernels work on blocks of channels."""
        channels = (self.weight_shape[0] // self.groups, self.weight_shape[1])
        return (
            self.G.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
            and all(count % 8 == 0 for count in channels)
        )

    def _by_groups(self) -> Tensor:
        """A few samples as one with so many times the channels and groups: nothing is unfolded."""
        grads = self.G.new_empty((self.batch_size, *self.weight_shape))
        copied = self.x[:1].numel() + self.G[:1].numel() + self.weight_shape.numel()
        step = max(1, self.COPIED_ELEMENTS // max(1, copied))
        for x, G, out in zip(
            self.x.split(step), self.G.split(step), grads.split(step), strict=True
        ):
            groups = out.shape[0] * self.groups
            # The weight that is asked for gives shape only: the result's own place will do.
            out.flatten(0, 1).copy_(
                self._weight_grad(
                    x.reshape(1, -1, *x.shape[2:]),
                    G.reshape(1, -1, *G.shape[2:]),
                    out.flatten(0, 1),
                    groups,
                )
            )
        return grads

    def _by_patches(self) -> Tensor:
        B, groups = self.batch_size, self.groups
        grads = self.G.new_empty((B, *self.weight_shape))
        grads_Npd = grads.view(B * groups, self.weight_shape[0] // groups, -1)
        for rows in self._chunks():
            outer = self._outer(rows)
            chunk = slice(rows.start * groups, rows.stop * groups)
            torch.bmm(outer.G_BTp.mT, outer.A_BTd, out=grads_Npd[chunk])
        return grads

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        x, G = self.x, self.G
        if coef_B is not None:
            G = row_scale(G.contiguous(), coef_B, backend=backend)
            # The input is not scaled, so 0 * inf must be kept out of it as well. Only the CPU may
            # look whether there is such a sample; on a GPU looking would wait for the device.
            if coef_B.device.type != "cpu" or bool((coef_B == 0).any()):
                keep = (coef_B != 0).view(-1, *[1] * (x.dim() - 1))
                x = torch.where(keep, x, x.new_zeros(()))
        return self._weight_grad(x, G, x.new_empty(self.weight_shape), self.groups)

    def _weight_grad(self, x: Tensor, G: Tensor, like: Tensor, groups: int) -> Tensor:
        """What PyTorch's own backward gives for a weight of this shape; its values are not read."""
        return torch.ops.aten.convolution_backward(
            G,
            x,
            like,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * (x.dim() - 2),
            groups,
            [False, True, False],
        )[1]

    def dense(self) -> Tensor:
        outer = self._outer(slice(None))
        return outer.dense().reshape(self.batch_size, *self.weight_shape)


def merge(factors: Sequence[Factor]) -> Factor:
    """One factor for all uses of one parameter: uses of one kind are laid end to end along T."""
    if len(factors) == 1:
        return factors[0]
    by_kind: dict[type[Factor], list[Factor]] = {}
    for factor in factors:
        by_kind.setdefault(type(factor), []).append(factor)
    merged = [
        kind.concatenate(group) if len(group) > 1 else group[0] for kind, group in by_kind.items()
    ]
    if len(merged) == 1:
        return merged[0]
    kinds = {type(factor): factor for factor in merged}
    if set(kinds) == {Lookup, Outer}:
        lookup, head = kinds[Lookup], kinds[Outer]
        assert isinstance(lookup, Lookup) and isinstance(head, Outer)
        return TiedEmbedding(lookup, head)
    return Dense.sum_of(merged)
