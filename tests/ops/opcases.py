"""Operations on samples: how each is called, and what it returns for each sample in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_clipping.layers.ops.product_key import product_key_backward, product_key_scores
from flash_clipping.ops.clipped_sum import clipped_sums, clipped_sums_many
from flash_clipping.ops.convolution import (
    Geometry,
    convolution_grads,
    convolution_sqnorms,
    convolution_sum,
)
from flash_clipping.ops.embedding import embedding_clipped_sum, embedding_sqnorms
from flash_clipping.ops.gram import gram_sqnorms
from flash_clipping.ops.linear import linear_sqnorms
from flash_clipping.ops.norm_layer import group_norm_grads, norm_backward
from flash_clipping.ops.outer import outer_sqnorms, weighted_sum
from flash_clipping.ops.rows import row_scale, row_sums
from tests.ops.cases import (
    Case,
    per_sample_gradients,
    relative_error,
    worst_relative_error,
)

Shape = tuple[int, ...]
Results = tuple[Tensor, ...]

V = 11


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """An operation on samples, which are the first axis of its operands.

    Attributes:
        shapes: of all operands, for each size that is tried. The first size, of three samples, is
            tried in other places in memory and with other values.
        call: the results of a backend, operands and coefficients.
        reference: each sample's results, of operands in float64.
        takes: what coefficients make of each sample's results: their "sum" or scaled "rows"; or
            there are none.
        rounded: which results are rounded once to the operands' dtype. Others are in the
            accumulator's.
        at_most: of errors, where they are smaller than sums of many products have them.
        slack: of errors, where a result is rounded several times.
        any_dtype: results are in the operands' dtype or in the accumulator's.
        repeats: the same bits in every run; by kernels alone, or not on a GPU.
        keeps: gradients are kept: after each sample's come the squared norms of what was kept.
        long: shapes of operands with many positions or features, and their scale and mean.
    """

    shapes: Sequence[tuple[Shape, ...]]
    call: Callable[..., Results]
    reference: Callable[..., Results]
    takes: str = ""
    rounded: tuple[bool, ...] = (False,)
    at_most: float = 1.0
    slack: float = 1.0
    any_dtype: bool = False
    repeats: str = "everywhere"
    keeps: bool = False
    long: tuple[tuple[Shape, float, float], ...] = ()

    def operands(self, case: Case, shapes: tuple[Shape, ...]) -> list[Tensor]:
        return [case.randn(*shape, seed=seed) for seed, shape in enumerate(shapes)]

    def expected(self, operands: Sequence[Tensor], coef_B: Tensor) -> list[Tensor]:
        """In float64. A sample whose coefficient is 0 is left out, whatever it holds."""
        wide = [x.detach().cpu().double() for x in operands]
        if not self.takes:
            return [*self.reference(*wide)]
        coef_B = coef_B.cpu().double()
        wide = [x.index_fill(0, (coef_B == 0).nonzero().flatten(), 0) for x in wide]
        rows = [row * coef_B.view(-1, *[1] * (row.dim() - 1)) for row in self.reference(*wide)]
        return [row.sum(0) for row in rows] if self.takes == "sum" else rows

    def check(
        self,
        case: Case,
        found: Sequence[Tensor],
        expected: Sequence[Tensor],
        rows: Any = slice(None),
        what: object = "",
    ) -> None:
        """Every result, or these samples of it, against float64; norms one by one."""
        assert len(found) == len(expected) + self.keeps
        for number, (result, wanted) in enumerate(zip(found, expected, strict=False)):
            error = worst_relative_error if wanted.dim() == 1 else relative_error
            assert error(result[rows], wanted[rows]) <= self.tolerance(case, number), (what, number)
        if self.keeps:  # what is measured is what is kept: the norm of the rounded values
            kept_B = found[0].double().flatten(1).square().sum(1)
            assert worst_relative_error(found[1][rows], kept_B[rows]) <= case.tolerance, what

    def tolerance(self, case: Case, result: int) -> float:
        error = case.rounding if self.is_rounded(result) else case.tolerance
        return min(self.slack * error, self.at_most)

    def is_rounded(self, result: int) -> bool:
        return self.rounded[min(result, len(self.rounded) - 1)]

    def repeats_bits(self, case: Case) -> bool:
        if self.repeats == "on kernels":
            return case.backend == "triton"
        return self.repeats == "everywhere" or case.device == "cpu"


# -- products of two operands ----------------------------------------------------------------------


def products(*sizes: tuple[int, ...]) -> list[tuple[Shape, ...]]:
    """``(B, T, d, p, ...)``: an A of d features, and a G of p, or several."""
    return [tuple((B, T, width) for width in widths) for B, T, *widths in sizes]


def squares_of_products(A: Tensor, *Gs: Tensor) -> Results:
    return tuple(grads.square().sum((1, 2)) for grads in of_products(A, *Gs))


def of_products(A: Tensor, *Gs: Tensor) -> Results:
    A = A if A.dim() == 2 else A.flatten(1, -2)
    A, *rest = (x.unsqueeze(1) if x.dim() == 2 else x for x in (A, *Gs))
    return tuple(per_sample_gradients(A, G.flatten(1, -2)) for G in rest)


def sum_in_one_launch(backend: str, A: Tensor, G: Tensor, coef_B: Tensor) -> Results:
    return tuple(clipped_sums_many([(A, G)], coef_B, backend=backend))


PRODUCTS = {
    "gram": OpCase(
        shapes=[
            *products((3, 20, 16, 24), (2, 140, 40, 72)),
            ((2, 3, 5, 16), (2, 3, 5, 8)),  # more leading dimensions are positions
        ],
        call=lambda backend, A, G, _: (gram_sqnorms(A, [G], backend=backend)[0][0],),
        reference=squares_of_products,
        long=(((2, 128, 65536), 1, 0), ((2, 128, 32), 1, 0)),
    ),
    # The last size is stored tile by tile through descriptors; its second tile of d reaches past
    # the end.
    "outer": OpCase(
        shapes=(
            OUTER := products(
                *((3, 17, 24, 40), (1, 1, 8, 8), (2, 70, 130, 35), (2, 1, 5, 3)),
                *((0, 4, 8, 8), (2, 0, 8, 6), (2, 70, 150, 72), (2, 33, 200, 128)),
            )
        ),
        call=lambda backend, A, G, _: (outer_sqnorms(A, G, backend=backend)[0],),
        reference=squares_of_products,
        long=(((1, 65536, 64), 1, 1), ((1, 65536, 64), 0.1, 1)),
    ),
    "outer, kept": OpCase(
        shapes=OUTER,
        call=lambda backend, A, G, _: outer_sqnorms(A, G, store=True, backend=backend)[::-1],
        reference=of_products,
        rounded=(True,),
        keeps=True,
    ),
    "linear": OpCase(
        shapes=[((3, 6), (3, 5)), *products((3, 3, 64, 32), (3, 40, 8, 12))],
        call=lambda backend, A, G, _: (linear_sqnorms([(A, [G])], backend=backend)[0][0][0],),
        reference=squares_of_products,
    ),
    "clipped sums": OpCase(
        shapes=products(
            *((3, 17, 24, 40), (3, 17, 40, 24), (3, 9, 40, 24, 16), (1, 1, 8, 8)),
            *((2, 33, 16, 8, 40, 12), (0, 4, 8, 6), (2, 0, 8, 6, 8)),
        ),
        call=lambda backend, A, *Gs_coef: tuple(
            clipped_sums(A, Gs_coef[:-1], Gs_coef[-1], backend=backend)
        ),
        reference=of_products,
        takes="sum",
    ),
    # As the last layer of a classifier has them.
    "clipped sums of one position": OpCase(
        shapes=products((3, 1, 24, 10), (130, 1, 24, 10)),
        call=sum_in_one_launch,
        reference=of_products,
        takes="sum",
        at_most=1e-6,
    ),
    "stored gradients": OpCase(
        shapes=[((3, 40, 24),), ((1, 7),), ((5, 3, 5, 67),), ((0, 4, 4),)],
        call=lambda backend, grads, coef_B: (weighted_sum(grads, coef_B, backend=backend),),
        reference=lambda grads: (grads,),
        takes="sum",
        at_most=1e-6,
    ),
}


# -- tables ----------------------------------------------------------------------------------------


def ids_of(G: Tensor) -> Tensor:
    """Of its positions, some of them several times, and the same for every layout of ``G``."""
    count = G.shape[:-1].numel()
    generator = torch.Generator().manual_seed(count)
    return torch.randint(V, G.shape[:-1], generator=generator).to(G.device)


def tables_of(G: Tensor, padding_idx: int | None) -> Tensor:
    onehot = F.one_hot(ids_of(G), V).double()
    if padding_idx is not None:
        onehot[..., padding_idx] = 0
    return torch.einsum("b...v,b...d->bvd", onehot, G)


def embedding(padding_idx: int | None) -> dict[str, OpCase]:
    of: dict[str, Any] = {"padding_idx": padding_idx}
    name = "embedding" if padding_idx is None else "embedding, padded"
    return {
        name: OpCase(
            shapes=[
                *(((3, 37, 24),), ((1, 1, 8),), ((2, 130, 5),), ((0, 4, 8),), ((2, 0, 8),)),
                ((4, 16),),
            ],
            call=lambda backend, G, _: (embedding_sqnorms(ids_of(G), G, **of, backend=backend),),
            reference=lambda G: (tables_of(G, padding_idx).square().sum((1, 2)),),
        ),
        f"sums of {name}": OpCase(
            shapes=[((3, T, 8),) for T in (20, 200, 4000)],
            call=lambda backend, G, coef_B: (
                embedding_clipped_sum(ids_of(G), G, coef_B, V, **of, backend=backend),
            ),
            reference=lambda G: (tables_of(G, padding_idx),),
            takes="sum",
            rounded=(True,),  # PyTorch's own kernel adds up in the table's dtype on a CPU
            slack=4.0,
            any_dtype=True,
            repeats="on a CPU",
        ),
    }


# -- convolutions ----------------------------------------------------------------------------------


def of_convolution(x: Tensor, G: Tensor, of: Geometry) -> Tensor:
    """Gradients of one sample after the other, by autograd in float64."""
    x, G = x.cpu().double(), G.cpu().double()
    convolve: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(of.kernel)]
    weight = torch.zeros(of.weight_shape(x, G), dtype=torch.float64, requires_grad=True)
    how = (of.stride, of.padding, of.dilation, of.groups)
    grads = weight.new_zeros(len(x), *weight.shape)
    for b, grad in enumerate(grads):
        y = convolve(x[b : b + 1], weight, None, *how)
        grad.copy_(torch.autograd.grad(y, weight, G[b : b + 1])[0])
    return grads


def convolution(
    name: str, of: Geometry, *shapes: tuple[Shape, ...], tf32: bool = False, **options: Any
) -> dict[str, OpCase]:
    """Norms, gradients that are kept, and clipped sums."""

    def norms(backend: str, x: Tensor, G: Tensor, _: Tensor) -> Results:
        parts, error_bound = convolution_sqnorms(x, G, of, tf32=tf32, backend=backend)
        assert tf32 or not len(x) or (error_bound is None) == (backend == "triton")
        return (parts.sum(1),)

    def kept(backend: str, x: Tensor, G: Tensor, _: Tensor) -> Results:
        grads, parts = convolution_grads(x, G, of, tf32=tf32, backend=backend)
        wide = torch.promote_types(grads.dtype, torch.float32)
        return grads, grads.to(wide).flatten(1).square().sum(1) if parts is None else parts.sum(1)

    def total(backend: str, x: Tensor, G: Tensor, coef_B: Tensor) -> Results:
        return (convolution_sum(x, G, coef_B, of, tf32=tf32, backend=backend),)

    def reference(x: Tensor, G: Tensor) -> Results:
        return (of_convolution(x, G, of),)

    given: Any = {"shapes": shapes, "reference": reference, "repeats": "on kernels"}
    squares = {"reference": lambda x, G: (of_convolution(x, G, of).flatten(1).square().sum(1),)}
    # PyTorch's convolutions do not know how many channels none has.
    some = {"shapes": [size for size in shapes if size[0][0]], "any_dtype": True, "keeps": True}
    return {
        f"convolution, {name}": OpCase(call=norms, **given | squares | options),
        f"convolution, {name}, kept": OpCase(call=kept, **given | some, rounded=(True,)),
        f"sums of convolution, {name}": OpCase(call=total, **given, takes="sum"),
    }


def images(of: Geometry, x_shape: Shape, channels: int, *batches: int) -> list[tuple[Shape, Shape]]:
    """Shapes of inputs and output gradients."""
    sizes = of.out_sizes(torch.Size((1, *x_shape)))
    return [((B, *x_shape), (B, channels, *sizes)) for B in batches]


STRIDED = Geometry((3, 2), (2, 1), (1, 2), (1, 1), 1)
DEPTHWISE = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 6)
SIGNAL = Geometry((1,), (1,), (0,), (1,), 1)

# -- normalization, rows and choices ---------------------------------------------------------------


def normalization(centred: bool, affine: bool) -> OpCase:
    def statistics(x: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        mean = x.mean(-1, keepdim=True) if centred else None
        off = x if mean is None else x - mean
        rstd = (off.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return mean, rstd, off * rstd

    def weight_of(x: Tensor) -> Tensor | None:
        return torch.linspace(-1, 2, x.shape[-1]).to(x.device, x.dtype) if affine else None

    def call(backend: str, x: Tensor, G: Tensor, _: Tensor) -> Results:
        mean, rstd, _ = statistics(x.double())
        dtype = torch.promote_types(x.dtype, torch.float32)
        found = norm_backward(
            x, G, mean if mean is None else mean.to(dtype), rstd.to(dtype), weight_of(x),
            input_grad=True, weight_grad=True, bias_grad=True, backend=backend,
        )  # fmt: skip
        return tuple(part for part in found if part is not None)

    def reference(x: Tensor, G: Tensor) -> Results:
        x = x.clone().requires_grad_()
        _, _, x_hat = statistics(x)
        weight = weight_of(x)
        (dx,) = torch.autograd.grad(x_hat if weight is None else x_hat * weight, x, G)
        return dx, (G * x_hat.detach()).sum(1), G.sum(1)

    # The last is large enough for another way on a CPU.
    sizes = [(3, 17, 24), (1, 1, 8), (2, 5, 130), (2, 1, 5), (0, 4, 8), (2, 0, 8), (2, 70, 130)]
    shapes = [(size, size) for size in sizes]
    return OpCase(shapes=shapes, call=call, reference=reference, rounded=(True, False, False))


def group_normalization(groups: int) -> OpCase:
    def x_hat_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grouped = x.reshape(len(x), groups, x.shape[1:].numel() // groups)
        mean, rstd = grouped.mean(-1), (grouped.var(-1, correction=0) + 1e-5).rsqrt()
        return mean, rstd, ((grouped - mean[..., None]) * rstd[..., None]).reshape(x.shape)

    def call(backend: str, x: Tensor, G: Tensor, _: Tensor) -> Results:
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean, rstd, _ = x_hat_of(x.double())
        return group_norm_grads(x, G, mean.to(dtype), rstd.to(dtype), backend=backend)

    def reference(x: Tensor, G: Tensor) -> Results:
        products, G = (
            part.reshape(*x.shape[:2], x.shape[2:].numel()) for part in (G * x_hat_of(x)[2], G)
        )
        return products.sum(-1), G.sum(-1)

    sizes = [(3, 6, 35), (1, 4, 4), (2, 8, 3, 5), (2, 4), (0, 4, 3)]
    return OpCase(shapes=[(size, size) for size in sizes], call=call, reference=reference)


def call_row_sums(backend: str, *rows_coef: Tensor) -> Results:
    sums_BN, sq_PB = row_sums(rows_coef[:-1], backend=backend)
    return sums_BN, sq_PB.mT


def of_row_sums(*rows: Tensor) -> Results:
    sums = [x.sum(1) for x in rows]
    return torch.cat(sums, 1), torch.stack([x.square().sum(1) for x in sums], 1)


def choose(backend: str, x: Tensor, y: Tensor, grad: Tensor, _: Tensor) -> Results:
    """Scores of the best experts of product keys, and gradients of both axes' logits."""
    k = grad.shape[1]
    scores, indices = product_key_scores(x, y, k, backend=backend)
    return scores, *product_key_backward(grad, indices, x, y, backend=backend)


def of_choices(x: Tensor, y: Tensor, grad: Tensor) -> Results:
    x, y = (axis.clone().requires_grad_() for axis in (x, y))
    every = (x.log_softmax(1)[:, :, None] + y.log_softmax(1)[:, None]).flatten(1)
    sums = (x[:, :, None] + y[:, None]).flatten(1).sort(dim=1, descending=True, stable=True)
    scores = every.gather(1, sums.indices[:, : grad.shape[1]])
    return scores.detach(), *torch.autograd.grad(scores, (x, y), grad)


OPS: dict[str, OpCase] = {
    **PRODUCTS,
    **embedding(None),
    **embedding(3),
    **convolution("strided", STRIDED, *images(STRIDED, (5, 9, 6), 18, 3, 0, 1)),
    **convolution("depthwise", DEPTHWISE, *images(DEPTHWISE, (6, 4, 4), 6, 3)),
    **convolution(
        "of a signal",
        SIGNAL,
        *images(SIGNAL, (8, 40), 6, 3),
        long=(((1, 64, 65536), 1, 1), ((1, 64, 65536), 0.1, 1)),
    ),
    "layer norm": normalization(centred=True, affine=True),
    "layer norm without weight": normalization(centred=True, affine=False),
    "rms norm": normalization(centred=False, affine=True),
    "rms norm without weight": normalization(centred=False, affine=False),
    "group norm": group_normalization(1),
    "group norm of two": group_normalization(2),
    "row sums": OpCase(
        shapes=[
            tuple((B, T, width) for width in widths)
            for B, T, widths in (
                (3, 17, [24, 24, 24]),
                (3, 17, [24]),
                (2, 1, [130, 5, 260, 1]),
                (1, 70, [5, 5]),
                (2, 3, [5, 0, 300]),
                (4, 33, [257, 128, 129]),
                (0, 4, [4, 8]),
                (2, 0, [3, 200]),
            )
        ],  # fmt: skip
        call=call_row_sums,
        reference=of_row_sums,
    ),
    "scaled rows": OpCase(
        shapes=[((3, 17, 24),), ((1, 8),), ((4, 3, 5, 67),), ((0, 4, 4),), ((2, 0, 3),)],
        call=lambda backend, x, coef_B: (row_scale(x, coef_B, backend=backend),),
        reference=lambda x: (x,),
        takes="rows",
        at_most=1e-7,
    ),
    "product keys": OpCase(
        shapes=[
            ((3, 24), (3, 24), (3, 4)),
            ((40, 24), (40, 24), (40, 4)),
            ((0, 8), (0, 8), (0, 3)),
        ],
        call=choose,
        reference=of_choices,
        rounded=(True,),
    ),
}
