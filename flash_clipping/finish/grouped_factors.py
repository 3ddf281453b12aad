"""The factors of one backward pass, put together as its plan has them handled.

Shape suffixes: ``B`` samples, ``P`` parameters, ``n`` elements of one of them, ``N`` of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_clipping.factors import DenseGrad, PerSampleGrad, accumulation_dtype
from flash_clipping.finish.clipping import Coefficients
from flash_clipping.finish.plan import Plan
from flash_clipping.ops.clipped_sum import clipped_sums_many, in_turn
from flash_clipping.ops.clipped_sum.table import AT_ONCE
from flash_clipping.ops.linear import linear_sqnorm_blocks
from flash_clipping.ops.outer import sum_parts, weighted_sum, weighted_sums_many
from flash_clipping.ops.rows import row_sums
from flash_clipping.ops.runtime.shapes import Group, Normalized

#: Rows ``[n, B]`` of several parameters, and the ids of these.
Blocks: TypeAlias = list[tuple[Sequence[int], Tensor]]

#: Takes the clipped sums of some parameters, whose ids come first.
Add: TypeAlias = Callable[[Sequence[int], Sequence[Tensor]], None]


class VectorStack(NamedTuple):
    """Small per-sample gradients of several parameters, side by side, and their squared norms.

    A model has a bias and a norm layer for every few matrices; one by one, their launches take
    longer than their arithmetic.

    Attributes:
        keys: ids of the parameters.
        sizes: elements of each.
        grads_BN, sq_PB: gradients and squared norms.
        shape: of every parameter, where all have one.
    """

    keys: list[int]
    sizes: Sequence[int]
    grads_BN: Tensor
    sq_PB: Tensor
    shape: Sequence[int] | None = None

    def clipped_sums(self, coefs: Sequence[Tensor], backend: str) -> Sequence[Tensor]:
        """One clipped sum per parameter, ``[n]`` or in its shape where all have one, in order and
        in fp32 (float64 for float64); by one coefficient vector for all, or one for each."""
        if len(coefs) == 1 or all(coef is coefs[0] for coef in coefs):
            sums_N = weighted_sum(self.grads_BN, coefs[0], backend=backend)
            if self.shape is None:
                return sums_N.split(self.sizes)
            return sums_N.view(len(self.keys), *self.shape).unbind(0)
        columns = zip(self.grads_BN.split(self.sizes, 1), coefs, strict=True)
        sums = [weighted_sum(column, coef, backend=backend) for column, coef in columns]
        return sums if self.shape is None else [sum_n.view(self.shape) for sum_n in sums]


class GroupedFactors:
    """One factor for each parameter, by how they are handled together; norms, then clipped sums.

    Parameters go by their ``id``.

    Args:
        factors: one for each parameter.
        plan: puts them together.
    """

    def __init__(self, backend: str, factors: Mapping[int, Any], plan: Plan):
        self.backend = backend
        #: Linear maps that read one input, by their number in the plan.
        self.linear: dict[int, Group] = {}
        self.stacks: list[VectorStack] = []
        self.stored: dict[int, DenseGrad] = {}
        self.others: dict[int, PerSampleGrad] = {}
        #: Once sums are asked for: operands of linear maps, and sums that come with others, until
        #: their turn.
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._ready: dict[int, Tensor] = {}
        # Without comprehensions: they cost small models, which wait for the host.
        for number, keys in enumerate(plan.linear):
            A_BTd = factors[keys[0]].A_BTd
            Gs: list[Tensor] = []
            for key in keys:
                Gs += (factors[key].G_BTp,)
            self.linear[number] = A_BTd, Gs
        for keys in plan.sums:
            rows: list[Tensor] = []
            x_hats: list[Normalized | None] = []
            sizes: list[int] = []
            for key in keys:
                factor = factors[key]
                rows += (factor.rows_BTn,)
                x_hats += (factor.normalized,)
                sizes += (factor.rows_BTn.shape[2],)
            memo = plan.memos["row_sums", keys[0]]
            grads_BN, sq_PB = row_sums(rows, x_hats, backend=backend, memo=memo)
            self.stacks.append(VectorStack(keys, sizes, grads_BN, sq_PB))
        for keys in plan.vectors:
            # A stack takes over a memory format (channels_last) that all have in common.
            grads = torch.stack([factors[key].grads for key in keys], dim=1).contiguous()
            B, P, *shape = grads.shape
            n = grads.shape[2:].numel()  # a scalar's is 1
            dtype = accumulation_dtype(grads.dtype)
            norms_BP = torch.linalg.vector_norm(grads.view(B, P, n), dim=2, dtype=dtype)
            stack = keys, [n] * P, grads.view(B, P * n), norms_BP.square_().T, shape
            self.stacks.append(VectorStack(*stack))
        for key in plan.stored:
            self.stored[key] = factors[key]
        for key in plan.others:
            self.others[key] = factors[key]

    def forget(self) -> None:
        """Let go of all of them."""
        self.linear.clear()
        self.stacks.clear()
        self.stored.clear()
        self.others.clear()
        self._pairs.clear()
        self._ready.clear()

    # -- norms --------------------------------------------------------------------------------

    def sqnorms(self, plan: Plan) -> tuple[Blocks, Blocks]:
        """Squared norms, and what rounding may hide of those that are released by another
        product."""
        blocks: Blocks = []
        doubts: Blocks = []
        if self.linear:
            memo = plan.memos["linear_sqnorms"]
            groups = list(self.linear.values())
            for block in linear_sqnorm_blocks(groups, backend=self.backend, memo=memo):
                keys: list[int] = []
                for group, layer in block.order:
                    keys += (plan.linear[group][layer],)
                blocks += ((keys, block.sq_RB),)
                if block.doubt_RB is not None:
                    doubts += ((keys, block.doubt_RB),)
            del groups
        for stack in self.stacks:
            blocks += ((stack.keys, stack.sq_PB),)
        in_parts: list[int] = []
        parts: list[Tensor] = []
        for key, factor in (*self.stored.items(), *self.others.items()):
            parts_Bn = factor.sqnorm_parts(self.backend)
            if parts_Bn.shape[1] == 1:
                blocks += (([key], parts_Bn.mT),)
            else:  # added up together where their shapes are one
                in_parts += (key,)
                parts += (parts_Bn,)
        blocks += [([in_parts[i] for i in members], sq) for members, sq in sum_parts(parts)]
        for key, factor in self.others.items():
            if (doubt_B := factor.error_bound(self.backend)) is not None:
                doubts += (([key], doubt_B.unsqueeze(0)),)
        return blocks, doubts

    # -- clipped sums -------------------------------------------------------------------------

    def add_clipped_sums(
        self, plan: Plan, coef: Coefficients, add: Add, part: tuple[int, ...] | None = None
    ) -> None:
        """Hand on every parameter's clipped sum, letting go of factors on the way.

        ``part``: the ids of those whose sums are wanted now; the next call asks for others.
        """
        one = coef.one
        pairs, ready = self._pairs, self._ready
        for number, (A_BTd, Gs) in self.linear.items():
            for key, G in zip(plan.linear[number], Gs, strict=True):
                pairs[key] = A_BTd, G
        self.linear.clear()
        launches = plan.products.get(part)
        if launches is None:  # as many at a time as one launch serves
            keys = _among(pairs, part)
            members = in_turn([pairs[key] for key in keys], backend=self.backend)
            launches = plan.products[part] = [[keys[i] for i in each] for each in members]
        for number, launch in enumerate(launches):
            # Per-layer clipping weights a shared input differently for every reader.
            for keys in coef.alike(launch):
                operands = [*map(pairs.pop, keys)]
                memo = plan.memos["clipped_sums", part, number, *(() if one is not None else keys)]
                sums = clipped_sums_many(
                    operands, coef[keys[0]], backend=self.backend, checked=True, memo=memo
                )
                add(keys, sums)
                del operands, sums
        while self.stacks:
            stack = self.stacks.pop()
            coefs = [one] if one is not None else [coef[key] for key in stack.keys]
            ready.update(zip(stack.keys, stack.clipped_sums(coefs, self.backend), strict=True))
        if ready:
            keys = _among(ready, part)
            add(keys, [*map(ready.pop, keys)])
        self._add_stored(coef, add, part)
        for key in _among(self.others, part):
            add([key], [self.others.pop(key).clipped_sum(coef[key], self.backend)])

    def _add_stored(self, coef: Coefficients, add: Add, part: tuple[int, ...] | None) -> None:
        """Stored gradients, several at a time."""
        launches: list[list[int]] = []
        room = 0
        for key in _among(self.stored, part):
            elements = self.stored[key].grads.numel()
            if not launches or elements > room:
                launches += ([],)
                room = AT_ONCE * max(1, self.stored[key].batch_size)  # of parameters' elements
            launches[-1] += (key,)
            room -= elements
        for launch in launches:
            for keys in coef.alike(launch):
                grads = [self.stored.pop(key).grads for key in keys]
                add(keys, weighted_sums_many(grads, coef[keys[0]], backend=self.backend))
                del grads


def _among(found: Mapping[int, Any], part: Sequence[int] | None) -> list[int]:
    """The keys that are there, of all or of these."""
    return [*found] if part is None else [key for key in part if key in found]
