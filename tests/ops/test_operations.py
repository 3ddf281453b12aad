"""What holds of every operation on samples: what it returns, wherever its operands lie, and
whatever they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import (
    Case,
    every_case,
    every_case_interpreted_once,
    in_rows_on_16_bytes,
)
from tests.ops.opcases import OPS, OpCase

pytestmark = [
    pytest.mark.usefixtures("ranks_in_few_programs"),
    # Of the interpreter's numpy, where a row holds NaN.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def of_ops(names: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("op", [OPS[name] for name in names], ids=names)


#: The same numbers elsewhere in memory, with NaN in between, which nothing may read.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "time first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other feature": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
    "shifted": lambda x: torch.cat([x.new_full((3,), torch.nan), x.flatten()])[3:].view(x.shape),
    "rows on 16 bytes": in_rows_on_16_bytes,
}


def run(op: OpCase, case: Case, operands: Sequence[Tensor], coef_B: Tensor) -> tuple[Tensor, ...]:
    return op.call(case.backend, *operands, coef_B)


@every_case
@every_op
def test_operation_of_every_size_returns_what_float64_says_and_repeats_its_bits(
    op: OpCase, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the memory that it writes to held something else before."""
    wide = torch.promote_types(case.dtype, torch.float32)
    for shapes in op.shapes:
        operands = op.operands(case, shapes)
        before = [x.clone() for x in operands]
        coef_B = torch.rand(shapes[0][0], device=case.device)
        found = run(op, case, operands, coef_B)
        op.check(case, found, op.expected(operands, coef_B), what=shapes)
        for number, result in enumerate(found):
            is_rounded = op.is_rounded(number) and not (op.keeps and number)
            expected = case.dtype if is_rounded else wide
            assert result.dtype == expected or op.any_dtype, shapes
        assert all(torch.equal(x, y) for x, y in zip(operands, before, strict=True)), shapes
        is_slow = case.backend == "triton" and case.device == "cpu"  # the interpreter
        if op.repeats_bits(case) and (not is_slow or shapes in (op.shapes[0], op.shapes[-1])):
            with monkeypatch.context() as patch:
                poison_new_memory(patch)
                again = run(op, case, operands, coef_B)
            assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True)), shapes


def poison_new_memory(patch: pytest.MonkeyPatch) -> None:
    """Tensors without values begin with NaN, or with a large number."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            return x.fill_(torch.nan if x.is_floating_point() else 100)

        return made

    for place, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        patch.setattr(place, name, poisoned(getattr(place, name)))


@every_case_interpreted_once
@every_op
def test_operands_anywhere_in_memory_give_the_same_results(op: OpCase, case: Case) -> None:
    operands = op.operands(case, op.shapes[0])
    coef_B = torch.tensor([0.5, 2.0, 1.0], device=case.device)
    expected = op.expected(operands, coef_B)
    ways = [[name] * len(operands) for name in LAYOUTS]
    if len(operands) > 1:  # and each of them in another way
        names = [*LAYOUTS, *LAYOUTS]
        ways += [names[first : first + len(operands)] for first in (0, 1)]
    for way in ways:
        laid_out = [LAYOUTS[name](x) for name, x in zip(way, operands, strict=True)]
        assert all(torch.equal(x, y) for x, y in zip(operands, laid_out, strict=True))
        op.check(case, run(op, case, laid_out, coef_B), expected, what=way)


@every_case_interpreted_once
@of_ops([name for name, op in OPS.items() if op.takes != "sum"])
def test_sample_that_is_not_finite_leaves_the_others_alone(op: OpCase, case: Case) -> None:
    clean = op.operands(case, op.shapes[0])
    coef_B = torch.tensor([0.5, 2.0, 1.0], device=case.device)
    expected = op.expected(clean, coef_B)
    for number in range(len(clean)):
        for value in (torch.inf, torch.nan):
            operands = [x.clone() for x in clean]
            operands[number][1].view(-1)[3] = value
            found = run(op, case, operands, coef_B)
            assert any(not result[1].isfinite().all() for result in found), (number, value)
            op.check(case, found, expected, [0, 2], (number, value))


@every_case
@of_ops([name for name, op in OPS.items() if op.takes])
def test_sample_of_coefficient_zero_adds_nothing_whatever_it_holds(op: OpCase, case: Case) -> None:
    for shapes in (shapes for shapes in op.shapes if shapes[0][0] > 1):
        clean = op.operands(case, shapes)
        coef_B = torch.rand(len(clean[0]), device=case.device) + 0.1
        coef_B[1] = 0
        alone = [[number] for number in range(len(clean))] if shapes == op.shapes[0] else []
        for poisoned in (*alone, range(len(clean))):
            operands = [x.clone() for x in clean]
            for number in poisoned:
                operands[number][1] = torch.inf
                operands[number][1, :1] = torch.nan
            found = run(op, case, operands, coef_B)
            op.check(case, found, op.expected(operands, coef_B), what=(shapes, poisoned))
            if op.takes == "rows":
                assert all(not result[1].any() for result in found)
        for total in run(op, case, operands, torch.zeros_like(coef_B)):
            assert torch.equal(total, torch.zeros_like(total))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@of_ops([name for name, op in OPS.items() if op.long])
def test_long_sums_are_not_truncated(op: OpCase, dtype: torch.dtype) -> None:
    """Tensor cores truncate their accumulator: without care norms are 4e-4 too small."""
    case = Case("triton", "cuda", dtype)
    operands = [
        (scale * torch.randn(shape, device="cuda", dtype=dtype) + mean)
        for shape, scale, mean in op.long
    ]
    coef_B = torch.ones(len(operands[0]), device="cuda")
    op.check(case, run(op, case, operands, coef_B), op.expected(operands, coef_B))
