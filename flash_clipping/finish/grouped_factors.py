"""The factors of one backward pass, put together as its plan has them handled.

Shape suffixes: ``B`` samples, ``P`` parameters, ``n`` elements of one of them, ``N`` of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_clipping.factors import DenseGrad, PerSampleGrad, accumulation_dtype
from flash_clipping.finish.clipping import Coefficients
from flash_clipping.finish.plan import Plan
from flash_clipping.ops.clipped_sum import AT_ONCE, clipped_sums_many, in_turn
from flash_clipping.ops.error_bounds import squared_norms
from flash_clipping.ops.linear import linear_sqnorm_blocks
from flash_clipping.ops.outer import sum_parts, weighted_sum, weighted_sums_many
from flash_clipping.ops.rows import row_sums
from flash_clipping.ops.runtime.shapes import Group

_ROWS, _NORMALIZED = attrgetter("rows_BTn"), attrgetter("normalized")

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
    """

    keys: list[int]
    sizes: Sequence[int]
    grads_BN: Tensor
    sq_PB: Tensor


class GroupedFactors:
    """One factor for each parameter, by how they are handled together; norms, then clipped sums.

    Parameters go by their ``id``.

    Args:
        factors: one for each parameter.
        plan: puts them together.
    """

    def __init__(self, backend: str, factors: Mapping[int, Any], plan: Plan):
        self.backend = backend
        #: Operands of linear maps; those that read one input have one tensor for it.
        self.linear: dict[int, tuple[Tensor, Tensor]] = {}
        self.stacks: list[VectorStack] = []
        self.stored: dict[int, DenseGrad] = {}
        self.others: dict[int, PerSampleGrad] = {}
        #: Sums that come with others, until their turn.
        self._ready: dict[int, Tensor] = {}
        # Without comprehensions and loops: they cost small models, which wait for the host.
        for keys in plan.linear:
            A_BTd = factors[keys[0]].A_BTd
            for key in keys:
                self.linear[key] = A_BTd, factors[key].G_BTp
        for keys in plan.sums:
            found = [*map(factors.__getitem__, keys)]
            rows, x_hats = [*map(_ROWS, found)], [*map(_NORMALIZED, found)]
            sizes = [*map(Tensor.size, rows, repeat(2))]
            memo = plan.memos["row_sums", keys[0]]
            grads_BN, sq_PB = row_sums(rows, x_hats, backend=backend, memo=memo)
            self.stacks.append(VectorStack(keys, sizes, grads_BN, sq_PB))
        for keys in plan.vectors:
            # A stack takes over a memory format (channels_last) that all have in common.
            grads = torch.stack([factors[key].grads for key in keys], dim=1).contiguous()
            B, P, n = *grads.shape[:2], grads.shape[2:].numel()  # a scalar's is 1
            dtype = accumulation_dtype(grads.dtype)
            sq_BP = squared_norms(grads.view(B * P, n), dtype).view(B, P)
            stack = keys, [n] * P, grads.view(B, P * n), sq_BP.T
            self.stacks.append(VectorStack(*stack))
        for kept, keys in ((self.stored, plan.stored), (self.others, plan.others)):
            kept.update(zip(keys, map(factors.__getitem__, keys), strict=True))

    def forget(self) -> None:
        """Let go of all of them."""
        self.linear.clear()
        self.stacks.clear()
        self.stored.clear()
        self.others.clear()
        self._ready.clear()

    # -- norms --------------------------------------------------------------------------------

    def sqnorms(self, plan: Plan) -> tuple[Blocks, Blocks]:
        """Squared norms, and what rounding may hide of those that are released by another
        product."""
        blocks: Blocks = []
        doubts: Blocks = []
        if self.linear:
            memo = plan.memos["linear_sqnorms"]
            groups: list[Group] = []
            for members in plan.linear:
                As, Gs = zip(*map(self.linear.__getitem__, members), strict=True)
                groups += ((As[0], Gs),)
            for block in linear_sqnorm_blocks(groups, backend=self.backend, memo=memo):
                keys: list[int] = []
                for group, layer in block.order:
                    keys += (plan.linear[group][layer],)
                blocks += ((keys, block.sq_RB),)
                if block.doubt_RB is not None:
                    doubts += ((keys, block.doubt_RB),)
            del groups, As, Gs
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
        if parts:
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
        pairs, ready = self.linear, self._ready
        launches = plan.products.get(part)
        if launches is None:  # as many at a time as one launch takes
            keys = _among(pairs, part)
            members = in_turn([pairs[key] for key in keys], backend=self.backend)
            launches = plan.products[part] = [[keys[i] for i in each] for each in members]
        for number, launch in enumerate(launches):
            # Per-layer clipping weights a shared input differently for every reader.
            for keys, coef_B in [(launch, one)] if one is not None else coef.alike(launch):
                operands = [*map(pairs.pop, keys)]
                memo = plan.memos["clipped_sums", part, number, *(() if one is not None else keys)]
                sums = clipped_sums_many(operands, coef_B, backend=self.backend, memo=memo)
                add(keys, sums)
                del operands, sums
        while self.stacks:
            keys, sizes, grads_BN, _ = self.stacks.pop()
            found: Sequence[Tensor]
            (_, coef_B), *others = coef.alike(keys)
            if not others:
                found = weighted_sum(grads_BN, coef_B, backend=self.backend).split(sizes)
            else:
                columns = zip(keys, grads_BN.split(sizes, 1), strict=True)
                found = [weighted_sum(x, coef[key], backend=self.backend) for key, x in columns]
            ready.update(zip(keys, found, strict=True))
        if ready:
            keys = _among(ready, part)
            add(keys, [*map(ready.pop, keys)])
        if self.stored:
            self._add_stored(coef, add, part)
        if self.others:
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
            for keys, coef_B in coef.alike(launch):
                grads = [self.stored.pop(key).grads for key in keys]
                add(keys, weighted_sums_many(grads, coef_B, backend=self.backend))
                del grads


def _among(found: Mapping[int, Any], part: Sequence[int] | None) -> list[int]:
    """The keys that are there, of all or of these."""
    return [*found] if part is None else [key for key in part if key in found]
