"""When two steps have one layout, and which plans are kept."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from flash_clipping.factors import RowSum
from flash_clipping.finish.plan import Plan, Plans, layout_of_step
from flash_clipping.ops.runtime.shapes import Normalized


def test_only_the_plans_used_last_are_kept() -> None:
    plans = Plans()
    plans.SIZE = 2
    for number in range(3):
        if number == 2:
            assert plans.find(0, "layout 0") is not None  # used again: 1 is the oldest now
        plans.keep(number, f"layout {number}", Plan([], True))
    assert [plans.find(n, f"layout {n}") is not None for n in range(3)] == [True, False, True]


def test_equal_hashes_do_not_make_equal_layouts() -> None:
    plans = Plans()
    plans.keep(7, "one layout", Plan([], True))
    assert plans.find(7, "another layout") is None


def test_layouts_tell_apart() -> None:
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

    def layout(*rows: Tensor) -> Hashable:
        return layout_of_step([0] * len(rows), [RowSum(each) for each in rows], [], ())

    assert len({layout(each) for each in [x, *others]}) == 1 + len(others)
    assert layout(x) == layout(torch.ones(2, 3, 4))
    same, apart = layout(x, x), layout(x, torch.ones(2, 3, 4))
    assert same != apart
    assert apart == layout(torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    assert same == layout(x, x.view(2, 3, 4)) != layout(x, x.view(6, 4))


def test_room_between_rows_counts() -> None:
    """The same operand copied to rows on 16 bytes, or not: tables for kernels have the strides."""
    room = torch.zeros(3 * 5 * 16)
    for B, T in ((3, 5), (1, 5), (3, 1)):
        plain = room.as_strided((B, T, 9), (T * 9, 9, 1))
        apart = [room.as_strided((B, T, 9), (T * row, row, 1)) for row in (12, 16)]
        layouts = {layout_of_step([0], [RowSum(x)], [], ()) for x in (plain, *apart)}
        assert len(layouts) == 3


def test_strides_along_axes_of_one_element_say_nothing() -> None:
    x = torch.zeros(40)
    one_sample = [x.as_strided((1, 3, 4), (stride, 4, 1)) for stride in (12, 7)]
    one_position = [x.as_strided((3, 1, 4), (4, stride, 1)) for stride in (4, 5)]
    for first, second in (one_sample, one_position):
        layouts = {layout_of_step([0], [RowSum(each)], [], ()) for each in (first, second)}
        assert len(layouts) == 1


def test_which_operands_are_contiguous_counts() -> None:
    x = torch.zeros(60)
    whole = x.as_strided((3, 2, 4), (8, 4, 1))
    apart, further = [x.as_strided((3, 2, 4), (stride, 4, 1)) for stride in (12, 16)]
    ways = [(whole, apart), (apart, whole), (whole, further), (apart, further), (further, apart)]
    layouts = {layout_of_step([0, 1], [*map(RowSum, rows)], [], ()) for rows in ways}
    assert len(layouts) == len(ways)


def test_which_operands_are_whose_counts() -> None:
    """The same tensors in the same order: once the one is normalized, once the other."""
    rows = [torch.randn(2, 3, 1) for _ in range(2)]
    x_hat = Normalized(*[torch.randn(2, 3, 1) for _ in range(3)])
    ways = [
        [RowSum(rows[0], None, x_hat), RowSum(rows[1])],
        [RowSum(rows[0]), RowSum(rows[1], None, x_hat)],
    ]
    one, other = [layout_of_step([0, 1], factors, [], ()) for factors in ways]
    assert one != other


def test_dtypes_of_parameters_count() -> None:
    layer = nn.Linear(2, 2)
    before = layout_of_step([], [], list(layer.parameters()), ())
    layer.half()
    assert layout_of_step([], [], list(layer.parameters()), ()) != before
