"""Clipped sums one by one, in an order of the caller's."""

from __future__ import annotations

from torch import Tensor

from flash_clipping.finish.coefficients import Coefficients
from flash_clipping.finish.grouped_factors import GroupedFactors
from flash_clipping.finish.plan import Plan
from flash_clipping.ops.clipped_sum import clipped_sums_many, in_turn
from flash_clipping.ops.outer import weighted_sums_many


class OrderedSums:
    """The sums that :meth:`GroupedFactors.add_clipped_sums` gives in the order that suits launches.

    Parameters that share an input come together, and small ones all at once; the sum of any other
    is computed when it is asked for. Parameters go by their ``id``.

    Args:
        groups: factors, which are let go of on the way.
        plan: how they are handled.
        coef: of every parameter.
    """

    def __init__(self, groups: GroupedFactors, plan: Plan, coef: Coefficients):
        self.groups, self.plan, self.coef = groups, plan, coef
        self.backend = groups.backend
        self._group = {key: number for number, keys in enumerate(plan.linear) for key in keys}
        self._ready: dict[int, Tensor] = {}
        while groups.stacks:
            stack = groups.stacks.pop()
            sums = stack.clipped_sums([coef[key] for key in stack.keys], self.backend)
            self._ready.update(zip(stack.keys, sums, strict=True))

    def take(self, key: int) -> Tensor | None:
        """The clipped sum of a parameter; ``None`` where backward did not reach it."""
        groups = self.groups
        if key in self._ready:
            return self._ready.pop(key)
        if key in groups.stored:
            grads = [groups.stored.pop(key).dense()]
            return weighted_sums_many(grads, self.coef[key], backend=self.backend)[0]
        if key in groups.others:
            return groups.others.pop(key).clipped_sum(self.coef[key], self.backend)
        if self._group.get(key) in groups.linear:
            self._multiply(self._group[key])
            return self._ready.pop(key)
        return None

    def _multiply(self, number: int) -> None:
        """Linear maps that read one input."""
        A_BTd, Gs = self.groups.linear.pop(number)
        pairs = {key: (A_BTd, G) for key, G in zip(self.plan.linear[number], Gs, strict=True)}
        # Per-layer clipping weights a shared input differently for every reader.
        for keys in self.coef.alike(pairs):
            operands = [pairs.pop(key) for key in keys]
            for part in in_turn(operands, backend=self.backend):
                members = [keys[i] for i in part]
                sums = clipped_sums_many(
                    [operands[i] for i in part],
                    self.coef[keys[0]],
                    backend=self.backend,
                    checked=True,
                    memo=self.plan.memos["ordered", *members],
                )
                self._ready.update(zip(members, sums, strict=True))
