"""When two steps have one layout, and which plans are kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch
from torch import Tensor, nn

from flash_clipping.factors import PerSampleGrad, SumGrad
from flash_clipping.finish.plan import Layout, Plan, Plans, layout_of_step
from flash_clipping.ops.runtime.shapes import Normalized


def of(factors: Sequence[PerSampleGrad], params: Sequence[nn.Parameter] = ()) -> Layout:
    return layout_of_step(range(len(factors)), factors, params)


def of_rows(*rows: Tensor) -> Layout:
    return of([*map(SumGrad, rows)])


def are_one(first: Layout, second: Layout) -> bool:
    """Whether a plan for the first serves the second."""
    plans = Plans()
    plans.keep(first, Plan([], True))
    return plans.find(second) is not None


def are_apart(layouts: Sequence[Layout]) -> bool:
    pairs = permutations(layouts, 2)
    return all(are_one(each, each) for each in layouts) and not any(are_one(*two) for two in pairs)


def test_only_the_plans_used_last_are_kept() -> None:
    plans = Plans()
    plans.SIZE = 2
    layouts = [Layout(f"layout {number}", []) for number in range(3)]
    for number, layout in enumerate(layouts):
        if number == 2:
            assert plans.find(layouts[0]) is not None  # used again: 1 is the oldest now
        plans.keep(layout, Plan([], True))
    assert [plans.find(layout) is not None for layout in layouts] == [True, False, True]


def test_operands_of_other_layouts_are_told_apart() -> None:
    x = torch.zeros(2, 3, 4)
    room = torch.zeros(25)
    others = [
        x.double(),
        x.transpose(0, 1),
        torch.zeros(2, 4, 3).mT,
        torch.zeros(2, 12),
        torch.zeros(4, 3, 4)[::2],
        room[1:].view(2, 3, 4),
    ]
    assert are_apart([of_rows(each) for each in [x, *others]])
    assert are_one(of_rows(x), of_rows(torch.ones(2, 3, 4)))
    # Of the second tensor as of the first.
    assert are_apart([of_rows(torch.ones(1), each) for each in [x, *others]])
    same, apart, viewed = of_rows(x, x), of_rows(x, torch.ones(2, 3, 4)), of_rows(x, x.view(6, 4))
    assert are_apart([same, apart, viewed])
    assert are_apart([apart, of_rows(x, x.view(2, 3, 4))])  # two that are one memory
    assert are_one(apart, of_rows(torch.ones(2, 3, 4), torch.ones(2, 3, 4)))
    first, second = torch.zeros(0, 3), torch.zeros(0, 4)  # which have no memory to be told by
    assert are_apart([of_rows(first, second, first), of_rows(first, second, second)])


def test_room_between_rows_counts() -> None:
    """The same operand copied to rows on 16 bytes, or not: tables for kernels have the strides."""
    room = torch.zeros(3 * 5 * 16)
    for B, T in ((3, 5), (1, 5), (3, 1)):
        plain = room.as_strided((B, T, 9), (T * 9, 9, 1))
        apart = [room.as_strided((B, T, 9), (T * row, row, 1)) for row in (12, 16)]
        assert are_apart([of_rows(x) for x in (plain, *apart)])


def test_contiguous_operands_are_told_apart() -> None:
    x = torch.zeros(60)
    whole = x.as_strided((3, 2, 4), (8, 4, 1))
    apart, further = [x.as_strided((3, 2, 4), (stride, 4, 1)) for stride in (12, 16)]
    ways = [(whole, apart), (apart, whole), (whole, further), (apart, further), (further, apart)]
    assert are_apart([of_rows(*rows) for rows in ways])


def test_operands_of_other_parameters_are_told_apart() -> None:
    """The same tensors in the same order: once the one is normalized, once the other."""
    rows = [torch.randn(2, 3, 1) for _ in range(2)]
    x_hat = Normalized(*[torch.randn(2, 3, 1) for _ in range(3)])
    ways = [
        [SumGrad(rows[0], None, x_hat), SumGrad(rows[1])],
        [SumGrad(rows[0]), SumGrad(rows[1], None, x_hat)],
    ]
    assert are_apart([*map(of, ways)])


def test_statistics_of_other_layouts_are_told_apart() -> None:
    rows, x, mean, rstd = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.zeros(6), torch.ones(6)
    ways = [(mean, rstd), (mean.double(), rstd), (mean, torch.ones(12)[::2]), (mean, mean)]
    assert are_apart([of([SumGrad(rows, None, Normalized(x, *each))]) for each in ways])


def test_dtypes_of_parameters_are_told_apart() -> None:
    layer = nn.Linear(2, 2)
    params = list(layer.parameters())
    plans = Plans()
    plans.keep(of([], params), Plan([], True))
    layer.half()
    assert plans.find(of([], params)) is None
