"""The best experts of product keys, and gradients of both axes' logits, against float64.

N rows, s entries of an axis, E = s² experts, k choices.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from flash_clipping.layers.ops.product_key import product_key_backward, product_key_scores
from tests.ops.cases import Case, every_case, relative_error
from tests.support.errors import raises

# Of the interpreter's numpy, where a row holds NaN, and where a program has no row.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

#: N, s and k. The oracle sorts all experts of every row: more rows take long.
SIZES = [(64, 128, 32), (24, 256, 32)]
ODD_SIZES = [(70, 5, 25), (9, 1, 1), (12, 16, 128), (9, 7, 1), (9, 40, 33)]
LARGE = [
    (1024, 64, 16),
    (1024, 64, 32),
    (1024, 128, 16),
    (1024, 128, 32),
    (1024, 256, 16),
    (1024, 256, 32),
]
sizes = pytest.mark.parametrize(
    ("N", "s", "k"),
    [*SIZES, *ODD_SIZES, *(pytest.param(*size, marks=pytest.mark.slow) for size in LARGE)],
)
INF, NAN = float("inf"), float("nan")


def logits(case: Case, N: int, s: int, k: int) -> tuple[Tensor, Tensor]:
    """A third of the rows drawn, a third of small integers (all tie), a third all equal."""
    if case.backend == "triton" and case.device == "cpu":
        N = min(N, 66)  # two programs of the interpreter
    x, y = case.randn(N, s, seed=k), case.randn(N, s, seed=k + 1)
    for axis in (x, y):
        axis[N // 3 :] = axis[N // 3 :].round()
        axis[2 * N // 3 :] = 1.0
    return x, y


def oracle(x: Tensor, y: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """All E sums in float64, where those of these tests are exact; a stable sort."""
    x, y = x.cpu().double(), y.cpu().double()
    sums = (x[:, :, None] + y[:, None, :]).flatten(1)
    chosen = sums.sort(dim=1, descending=True, stable=True).indices[:, :k]
    scores = (x.log_softmax(1)[:, :, None] + y.log_softmax(1)[:, None, :]).flatten(1)
    return scores.gather(1, chosen), chosen


@sizes
@every_case
def test_the_best_experts_in_their_order(case: Case, N: int, s: int, k: int) -> None:
    x, y = logits(case, N, s, k)
    scores, indices = product_key_scores(x, y, k, backend=case.backend)
    expected, chosen = oracle(x, y, k)
    assert (scores.dtype, indices.dtype) == (case.dtype, torch.int32)
    assert torch.equal(indices.cpu().long(), chosen)
    assert relative_error(scores, expected) <= case.rounding
    assert bool((scores.diff(dim=1) <= 0).all())


def gradient_by_autograd(
    grad: Tensor, indices: Tensor, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Plain indexing of a plain log-softmax, of the choices that are experts."""
    s = x.shape[1]
    x, y = (axis.detach().cpu().double().requires_grad_() for axis in (x, y))
    n, j = torch.where((indices.cpu() >= 0) & (indices.cpu() < s * s))
    chosen = indices.cpu()[n, j].long()
    scores = x.log_softmax(1)[n, chosen // s] + y.log_softmax(1)[n, chosen % s]
    dx, dy = torch.autograd.grad((scores * grad.cpu().double()[n, j]).sum(), (x, y))
    return dx, dy


@sizes
@every_case
def test_gradients_on_given_indices(case: Case, N: int, s: int, k: int) -> None:
    """Any indices: twice the same, none, and some that are no experts."""
    x, y = logits(case, N, s, k)
    generator = torch.Generator().manual_seed(s + k)
    indices = torch.randint(s * s, (len(x), k), generator=generator, dtype=torch.int32)
    indices[::3, : k // 2] = indices[::3, :1]
    indices[1::3, ::2] = -1
    indices[2::4, -1] = s * s
    indices[4::5] = -(2**31)
    indices, grad = indices.to(x.device), case.randn(len(x), k, seed=2)
    grad[indices == -1] = NAN  # is not read
    found = product_key_backward(grad, indices, x, y, backend=case.backend)
    for dlogits, expected in zip(found, gradient_by_autograd(grad, indices, x, y), strict=True):
        assert dlogits.dtype == case.dtype
        assert relative_error(dlogits, expected) <= case.rounding
        assert not dlogits[4::5].any()


@every_case
def test_a_row_without_experts_has_no_gradient_whatever_it_holds(case: Case) -> None:
    x, y = case.randn(6, 8), case.randn(6, 8, seed=1)
    x[2], y[3, 1], x[4, 5] = NAN, INF, NAN
    indices = torch.zeros((6, 3), dtype=torch.int32, device=x.device)
    indices[2:4] = -1
    dx, dy = product_key_backward(case.randn(6, 3), indices, x, y, backend=case.backend)
    for dlogits in (dx, dy):
        assert not dlogits[2:4].any()
        assert dlogits[[0, 1, 5]].isfinite().all() and dlogits[[0, 1, 5]].any()
    assert dx[4].isnan().all()


@every_case
def test_sums_that_round_to_one_number_do_not_tie(case: Case) -> None:
    """The greater logit wins, though fp32 cannot tell the sums: it is the greater sum."""
    tiny = 2.0 ** (-60 if case.dtype == torch.float64 else -24)
    x = torch.tensor([[1.0, 2.0, 3.0, 3.0, 0.0]]) * tiny
    y = torch.tensor([[-1.0, 1.0, 1.0, 0.5, 2.0]]) * 64
    x, y = x.to(case.device, case.dtype), y.to(case.device, case.dtype)
    for k in (1, 6):
        _, indices = product_key_scores(x, y, k, backend=case.backend)
        sums = {
            5 * i + j: Fraction(float(x[0, i])) + Fraction(float(y[0, j]))
            for i in range(5)
            for j in range(5)
        }
        assert len({float(value) for value in sums.values()}) < 25 or case.dtype.itemsize < 8
        order = sorted(sums, key=lambda index: (-sums[index], index))
        assert indices[0].tolist() == order[:k]


@every_case
def test_experts_of_no_probability_are_not_chosen(case: Case) -> None:
    x, y = case.randn(3, 6), case.randn(3, 6, seed=1)
    x[1, [0, 2, 3, 4]] = y[1, 1:] = -INF
    scores, indices = product_key_scores(x, y, 4, backend=case.backend)
    best = [1, 5] if x[1, 1] > x[1, 5] else [5, 1]
    assert indices[1].tolist() == [6 * best[0], 6 * best[1], -1, -1]
    assert scores[1, :2].isfinite().all() and (scores[1, 2:] == -INF).all()
    assert (indices[[0, 2]] >= 0).all() and scores[[0, 2]].isfinite().all()
    grad = torch.ones_like(scores)
    grad[1, 2:] = NAN
    for dlogits in product_key_backward(grad, indices, x, y, backend=case.backend):
        assert dlogits.isfinite().all()


@every_case
def test_rows_without_probabilities_are_nan_and_stay_alone(case: Case) -> None:
    x, y = case.randn(9, 6), case.randn(9, 6, seed=1)
    plain = product_key_scores(x, y, 5, backend=case.backend)
    x[1, 2], x[2, 3], y[3], x[4], y[5, 5] = NAN, INF, -INF, NAN, -NAN
    if case.dtype in (torch.float32, torch.bfloat16):
        x[6, 0] = y[6, 0] = 3e38
    bad = [1, 2, 3, 4, 5] + [6] * (case.dtype in (torch.float32, torch.bfloat16))
    good = [n for n in range(9) if n not in bad]
    scores, indices = product_key_scores(x, y, 5, backend=case.backend)
    assert scores[bad].isnan().all()
    assert indices[bad].tolist() == [[0, 1, 2, 3, 4]] * len(bad)
    assert torch.equal(scores[good], plain[0][good])
    assert torch.equal(indices[good], plain[1][good])


def test_shapes_that_do_not_fit_are_refused() -> None:
    x = torch.randn(4, 8)
    for k in (0, 65, 129):
        with raises("FC302", ValueError, match=f"k = {k} for 8 x 8 experts; expected 1 to 64"):
            product_key_scores(x, x, k)
    with raises("FC302", ValueError, match="k = 129 for 12 x 12 experts; expected 1 to 128"):
        product_key_scores(torch.randn(4, 12), torch.randn(4, 12), 129)
    for other in (torch.randn(4, 9), torch.randn(3, 8), torch.randn(4, 1, 8)):
        with raises("FC303", ValueError, match="two matrices"):
            product_key_scores(x, other, 2)
    with raises("FC303", ValueError, match="float32 and torch.float64"):
        product_key_scores(x, x.double(), 2)
    with raises("FC303", ValueError, match="torch.int64"):
        product_key_scores(x.long(), x.long(), 2)
    with raises("FC303", ValueError, match="at most 46340"):
        product_key_scores(*[torch.empty(1, 50000)] * 2, 2)
    indices = torch.zeros(4, 2, dtype=torch.int32)
    with raises("FC303", ValueError, match=r"gradients \(4, 3\) and indices \(4, 2\)"):
        product_key_backward(torch.randn(4, 3), indices, x, x)
    with raises("FC303", ValueError, match="integers as indices"):
        product_key_backward(torch.randn(4, 2), indices.float(), x, x)
