from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_clipping.layers.ops.hyper_connections import (
    Gradients,
    Settings,
    hyper_connections,
    hyper_connections_backward,
)
from flash_clipping.layers.ops.stream_mix import stream_mix, stream_mix_backward
from flash_clipping.ops.runtime.backend import is_interpreting, is_triton_available
from tests.ops.cases import Case, every_case, every_case_wide_on_cpu, relative_error
from tests.support.errors import raises
from tests.support.hyper_connections import NAMES, Params, mix, params_of, sections, truth

# Two, four and eight streams; rooms that are not full; more positions and features than a block.
SHAPES = [
    (2, 3, 3, 20),
    (3, 7, 4, 40),
    (2, 4, 8, 33),
    (1, 2, 2, 1100),
    (2, 19, 2, 40),
]
#: In every dtype.
ORDINARY = (3, 7, 4, 40)
SETTINGS = Settings()


def with_shapes(*shapes: tuple[int, ...]) -> pytest.MarkDecorator:
    """Nothing that fp32 does not show is worth the time that the interpreter takes."""
    rows = [
        pytest.param(*case.values, shape, id=f"{shape}-{case.id}", marks=case.marks)
        for shape in shapes
        for case in (every_case if shape == ORDINARY else every_case_wide_on_cpu).args[1]
    ]
    return pytest.mark.parametrize(("case", "shape"), rows)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few positions are several blocks, where kernels are interpreted."""
    if is_interpreting() and is_triton_available():
        kernels = importlib.import_module("flash_clipping.layers.ops.hyper_connections.triton")
        for name, size in (("MIX_ROWS", 16), ("COLUMNS", 32), ("GRAD_ROWS", 32)):
            monkeypatch.setattr(kernels, name, size)


def params_on(case: Case, n: int, D: int, **options: Any) -> Params:
    """In fp32 whatever the streams are, as a module has them."""
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    return Params(*(p.to(case.device, dtype) for p in params_of(n, D, **options)))


def upstream(case: Case, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    B, S, n, D = shape
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    dpost, dcomb = case.randn(B, S, n, seed=2).to(dtype), case.randn(B, S, n, n, seed=3).to(dtype)
    return case.randn(B, S, D, seed=1), dpost, dcomb


def differentiate(
    case: Case, x: Tensor, params: Params, grads: tuple[Tensor, ...], **wanted: bool
) -> Gradients:
    result = hyper_connections(x, *params, SETTINGS, backend=case.backend)
    wanted = {"input_grad": True, "matrix_grad": True, **wanted}
    saved = result.inv_BS, result.mix_BSm
    return hyper_connections_backward(
        x, *params, *saved, *grads, SETTINGS, **wanted, backend=case.backend
    )


def by_name(grads: Gradients) -> dict[str, Tensor]:
    assert grads.phi_BmK is not None and grads.gamma_BnD is not None
    alpha_B3, bias_Bm = grads.alpha_BS3.sum(1), grads.bias_BSm.sum(1)
    return dict(zip(NAMES, (grads.phi_BmK, alpha_B3, bias_Bm, grads.gamma_BnD), strict=True))


def accuracy(case: Case) -> float:
    """Of what is in fp32: products with streams in bf16 split their other operand in two."""
    return 1e-4 if case.dtype == torch.bfloat16 and case.backend == "triton" else case.tolerance


def compare(case: Case, x: Tensor, params: Params, factor: float = 1.0) -> None:
    shape, n = tuple(x.shape), x.shape[2]
    grads = upstream(case, shape)
    expected = truth(x, params, grads)
    result = hyper_connections(x, *params, SETTINGS, backend=case.backend)
    assert result.h_BSD.dtype == x.dtype
    assert result.post_BSn.dtype == result.comb_BSnn.dtype == params.phi.dtype
    h, post, comb = expected.outputs
    tolerance = factor * accuracy(case)
    assert relative_error(result.h_BSD, h) <= max(tolerance, case.rounding)
    assert relative_error(result.post_BSn, post) <= tolerance
    assert relative_error(result.comb_BSnn, comb) <= tolerance
    found = differentiate(case, x, params, grads)
    assert found.x_BSnD is not None and found.x_BSnD.dtype == x.dtype
    assert relative_error(found.x_BSnD, expected.x) <= max(tolerance, 2 * case.rounding)
    for i, stream in enumerate(found.x_BSnD.unbind(2)):
        of_stream = expected.x[:, :, i]
        assert relative_error(stream, of_stream) <= max(tolerance, 2 * case.rounding), i
    for name, per_sample in by_name(found).items():
        assert per_sample.dtype == params.phi.dtype
        wanted = sections(name, expected.params[name], n)
        for part, grad in sections(name, per_sample, n).items():
            assert relative_error(grad, wanted[part]) <= tolerance, part


@with_shapes(*SHAPES)
def test_every_section_is_that_of_autograd(case: Case, shape: tuple[int, ...]) -> None:
    compare(case, case.randn(*shape), params_on(case, *shape[2:]))


@every_case
def test_logits_of_forty_keep_the_iterations_gradients(case: Case, sharpness: float = 40.0) -> None:
    """Matrices that 20 iterations leave far from doubly stochastic: what is differentiated are the
    iterations, not where they lead. Logits themselves are rounded to 1e-7 of 100."""
    x, params = case.randn(2, 4, 4, 40), params_on(case, 4, 40, sharpness=sharpness)
    if case.dtype.itemsize == 2:
        pytest.skip("logits are as far off as products are, times the sharpness")
    compare(case, x, params, factor=sharpness)


@every_case_wide_on_cpu
def test_scale_of_the_streams(case: Case) -> None:
    """The mean square is that of the streams without gamma, and its gradient counts where streams
    are small as well as where they are large."""
    for scale in (1e-3, 30.0):
        compare(case, scale * case.randn(2, 4, 2, 20), params_on(case, 2, 20))


def test_positions_in_several_chunks_match_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of a chunk, several chunks of a sample, and a last one that is not full."""
    kernels = pytest.importorskip("flash_clipping.layers.ops.hyper_connections.triton")
    monkeypatch.setattr(kernels, "CHUNK", 32)
    monkeypatch.setattr(kernels, "GRAD_ROWS", 32)
    case = Case("triton", "cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    compare(case, case.randn(2, 45, 2, 24), params_on(case, 2, 24))


@every_case_wide_on_cpu
def test_strides_and_what_is_left_alone(case: Case) -> None:
    x = case.randn(5, 2, 24, 4).permute(1, 0, 3, 2)
    params = params_on(case, 4, 24)
    strided = params._replace(phi=params.phi.T.contiguous().T, gamma=params.gamma.T.contiguous().T)
    dh, dpost, dcomb = upstream(case, (2, 5, 4, 24))
    transposed = (dh.mT.contiguous().mT, dpost.mT.contiguous().mT, dcomb.mT.contiguous().mT)
    inputs = (x, *strided, *transposed)
    before = [tensor.clone() for tensor in inputs]
    found = differentiate(case, x, strided, transposed)
    again = differentiate(case, x.contiguous(), params, (dh, dpost, dcomb))
    for name, one, other in zip(found._fields, found, again, strict=True):
        assert relative_error(one, other) <= case.tolerance, name
    for tensor, copy in zip(inputs, before, strict=True):
        assert torch.equal(tensor, copy)


@every_case_wide_on_cpu
@pytest.mark.filterwarnings("ignore:.*(invalid value|All-NaN)")
def test_a_sample_meets_no_other(case: Case) -> None:
    shape = (3, 5, 2, 24)
    x, params, grads = case.randn(*shape), params_on(case, 2, 24), upstream(case, shape)
    clean = differentiate(case, x, params, grads)
    poisoned = x.clone()
    poisoned[1, 3] = float("nan")
    poisoned[1, 4, 0, 0] = float("inf")
    for found, expected in zip(differentiate(case, poisoned, params, grads), clean, strict=True):
        assert found is not None and expected is not None
        assert torch.equal(found[[0, 2]], expected[[0, 2]])


@every_case_wide_on_cpu
def test_runs_are_equal_and_write_all_they_return(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the memory held something else before."""
    shape = (2, 5, 3, 24)
    x, params, grads = case.randn(*shape), params_on(case, 3, 24), upstream(case, shape)
    first = (
        *hyper_connections(x, *params, backend=case.backend),
        *differentiate(case, x, params, grads),
    )
    mixed = mix_inputs(case, shape)
    first += (*stream_mix_backward(*mixed, backend=case.backend),)
    for name in ("empty", "empty_like"):
        ordinary = getattr(torch, name)
        poison = lambda *args, make=ordinary, **kw: make(*args, **kw).fill_(float("nan"))  # noqa: E731
        monkeypatch.setattr(torch, name, poison)
    second = (
        *hyper_connections(x, *params, backend=case.backend),
        *differentiate(case, x, params, grads),
    )
    second += (*stream_mix_backward(*mixed, backend=case.backend),)
    for one, other in zip(first, second, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def mix_inputs(case: Case, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    B, S, n, D = shape
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    comb = case.randn(B, S, n, n, seed=6).to(dtype)
    return (
        case.randn(*shape),
        case.randn(B, S, D, seed=4),
        case.randn(B, S, n, seed=5).to(dtype),
        comb,
        case.randn(*shape, seed=7),
    )


@pytest.mark.parametrize("transposed", [True, False])
@with_shapes(*SHAPES[:-1], (2, 9, 1, 5))
def test_mixed_streams_are_those_of_autograd(
    case: Case, shape: tuple[int, ...], transposed: bool
) -> None:
    *inputs, grad = mix_inputs(case, shape)
    B, S, n, D = shape
    wide = [tensor.cpu().double().requires_grad_() for tensor in inputs]
    expected = torch.stack(
        [
            torch.stack([mix(*(w[b, s] for w in wide), transposed) for s in range(S)])
            for b in range(B)
        ]
    )
    found = stream_mix(*inputs, transposed=transposed, backend=case.backend)
    assert found.dtype == inputs[0].dtype
    assert relative_error(found, expected) <= case.rounding
    expected.backward(grad.cpu().double())
    grads = stream_mix_backward(*inputs, grad, transposed=transposed, backend=case.backend)
    for name, one, tensor, oracle in zip(
        ("x", "y", "post", "comb"), grads, inputs, wide, strict=True
    ):
        assert one.dtype == tensor.dtype, name
        tolerance = case.rounding if name in "xy" else case.tolerance
        assert relative_error(one, oracle.grad) <= tolerance, name


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, params = torch.randn(2, 3, 4, 8), params_of(4, 8)
    with raises("FC303", ValueError, match=r"x has shape \(2, 3, 9, 8\).* 2 to 8 streams"):
        hyper_connections(torch.randn(2, 3, 9, 8), *params)
    with raises(
        "FC303", ValueError, match=r"phi has shape \(24, 32\).* expected \[m, K\] = \(24, 40\)"
    ):
        hyper_connections(torch.randn(2, 3, 4, 10), *params)
    with raises("FC302", ValueError, match="at least one iteration"):
        hyper_connections(x, *params, Settings(iterations=0))
    with raises("FC302", ValueError, match="above 0"):
        hyper_connections(x, *params, Settings(hc_eps=0.0))
    *inputs, _ = mix_inputs(Case("torch", "cpu", torch.float32), (2, 3, 4, 8))
    with raises("FC303", ValueError, match=r"y has shape .*expected \[B, S, D\] = \(2, 3, 8\)"):
        stream_mix(inputs[0], inputs[1][:1], *inputs[2:])
