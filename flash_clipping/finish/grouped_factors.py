"""The factors of one backward pass, put together as its plan has them handled.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from flash_clipping.factors import Dense, Factor, VectorStack
from flash_clipping.finish.coefficients import Coefficients
from flash_clipping.finish.plan import Plan
from flash_clipping.ops.clipped_sum import clipped_sums_many, in_turn
from flash_clipping.ops.clipped_sum.table import AT_ONCE
from flash_clipping.ops.linear import linear_sqnorm_blocks
from flash_clipping.ops.outer import sum_parts, weighted_sums_many
from flash_clipping.ops.runtime.shapes import Group

#: Rows ``[n, B]`` of several parameters, and the ids of these.
Blocks: TypeAlias = list[tuple[Sequence[int], Tensor]]

#: Takes the clipped sums of some parameters, whose ids come first.
Add: TypeAlias = Callable[[Sequence[int], Sequence[Tensor]], None]


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
        self.stored: dict[int, Dense] = {}
        self.others: dict[int, Factor] = {}
        # Without comprehensions: they cost small models, which wait for the host.
        for number, keys in enumerate(plan.linear):
            A_BTd, Gs = factors[keys[0]].A_BTd, []
            for key in keys:
                Gs.append(factors[key].G_BTp)
            self.linear[number] = A_BTd, Gs
        take = factors.__getitem__
        for keys in plan.sums:
            memo = plan.memos["row_sums", keys[0]]
            self.stacks.append(VectorStack.of_sums(keys, [*map(take, keys)], self.backend, memo))
        for keys in plan.vectors:
            self.stacks.append(VectorStack.of_dense(keys, [*map(take, keys)]))
        for held, chosen in ((self.stored, plan.stored), (self.others, plan.others)):
            for key in chosen:
                held[key] = factors[key]

    def forget(self) -> None:
        """Let go of all of them."""
        self.linear.clear()
        self.stacks.clear()
        self.stored.clear()
        self.others.clear()

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
                keys = []
                for group, layer in block.order:
                    keys.append(plan.linear[group][layer])
                blocks.append((keys, block.sq_RB))
                if block.doubt_RB is not None:
                    doubts.append((keys, block.doubt_RB))
            del groups
        for stack in self.stacks:
            blocks.append((stack.keys, stack.sq_PB))
        if self.stored or self.others:
            blocks += self._sqnorms_one_by_one()
        for key, factor in self.others.items():
            if (doubt_B := factor.doubt(self.backend)) is not None:
                doubts.append(([key], doubt_B.unsqueeze(0)))
        return blocks, doubts

    def _sqnorms_one_by_one(self) -> Blocks:
        """Norms of stored gradients and all others; those that come in parts are added up together
        where their shapes are one."""
        of_one_part: Blocks = []
        keys: list[int] = []
        parts: list[Tensor] = []
        for key, factor in (*self.stored.items(), *self.others.items()):
            parts_Bn = factor.sqnorm_parts(self.backend)
            if parts_Bn.shape[1] == 1:
                of_one_part.append(([key], parts_Bn.mT))
            else:
                keys.append(key)
                parts.append(parts_Bn)
        return of_one_part + [([keys[i] for i in members], sq) for members, sq in sum_parts(parts)]

    # -- clipped sums -------------------------------------------------------------------------

    def add_clipped_sums(self, plan: Plan, coef: Coefficients, add: Add) -> None:
        """Hand on every parameter's clipped sum, letting go of factors on the way."""
        if self.linear:
            self._add_products(plan, coef, add)
        while self.stacks:
            stack = self.stacks.pop()
            coefs = [coef.one] if coef.one is not None else [coef[key] for key in stack.keys]
            add(stack.keys, stack.clipped_sums(coefs, self.backend))
        if self.stored:
            self._add_stored(coef, add)
        while self.others:
            key, factor = self.others.popitem()
            add([key], [factor.clipped_sum(coef[key], self.backend)])
            del factor

    def _add_products(self, plan: Plan, coef: Coefficients, add: Add) -> None:
        """Linear maps, as many at a time as one launch serves."""
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for number, (A_BTd, Gs) in self.linear.items():
            for key, G in zip(plan.linear[number], Gs, strict=True):
                pairs[key] = A_BTd, G
        self.linear.clear()
        if plan.products is None:
            keys = [*pairs]
            parts = in_turn([*pairs.values()], backend=self.backend)
            plan.products = [[keys[i] for i in part] for part in parts]
        for number, part in enumerate(plan.products):
            # Per-layer clipping weights a shared input differently for every reader.
            for keys in (part,) if coef.one is not None else coef.alike(part):
                memo = plan.memos["clipped_sums", number, *(() if keys is part else keys)]
                sums = clipped_sums_many(
                    [*map(pairs.pop, keys)],
                    coef.one if coef.one is not None else coef[keys[0]],
                    backend=self.backend,
                    checked=True,
                    memo=memo,
                )
                add(keys, sums)

    def _add_stored(self, coef: Coefficients, add: Add) -> None:
        """Stored gradients, several at a time."""
        for keys in coef.alike(self.stored):
            while keys:
                batch: list[int] = []
                elements = 0
                while keys and (not batch or elements + self._elements(keys[-1]) <= AT_ONCE):
                    batch.append(keys.pop())
                    elements += self._elements(batch[-1])
                grads = [self.stored.pop(key).dense() for key in batch]
                coef_B = coef[batch[0]]
                add(batch, weighted_sums_many(grads, coef_B, backend=self.backend))

    def _elements(self, key: int) -> int:
        """Of a parameter whose gradients are stored."""
        return self.stored[key].grads.shape[1:].numel()
