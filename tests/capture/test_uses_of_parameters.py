"""Whatever a model does with its parameters: exact against one sample at a time in float64, or
refused by name. Never a model that silently learns nothing, or something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping.capture import proxies
from tests.support.autograd import squares
from tests.support.errors import raises
from tests.support.uses import D, Holder, Scaling, T, exact, make_around, seeded_batch
from tests.support.wrapping import MODES, WRAPPERS

pytestmark = pytest.mark.without_gate


RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))


@torch.jit.script
def scripted(x: Tensor, gain: Tensor) -> Tensor:
    return torch.tanh(x * gain)


def without_grad(compute: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return compute()


def copied(m: Any, x: Tensor) -> Tensor:
    y = torch.zeros(D, dtype=x.dtype)
    y.copy_(m.v)
    return x + y


def added_in_place(m: Any, x: Tensor) -> Tensor:
    y = torch.zeros(D, dtype=x.dtype)
    y += m.v
    return x + y


def diagonal(m: Any, x: Tensor) -> Tensor:
    y = torch.zeros(D, D, dtype=x.dtype)
    y.diagonal().copy_(m.v)
    return x @ y


def slices_written(m: Any, x: Tensor) -> Tensor:
    y = torch.zeros(T, D, dtype=x.dtype)
    y[0], y[1] = m.v, m.w
    return x + y


def masked_tokens(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[x[..., 0] > 0] = m.v
    return y


def own_rows_in_place(m: Any, x: Tensor) -> Tensor:
    rows = m.token.expand(len(x), -1, -1) * 1
    rows.mul_(3)
    return torch.cat([rows, x], 1)


def attention(m: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return F.multi_head_attention_forward(
        x, x, x, D, 2, m.big, None, None, None, False, 0.0, m.square, m.v
    )[0].transpose(0, 1)


def energy_gradient(m: Any, x: Tensor) -> Tensor:
    return torch.autograd.grad(torch.tanh(x * m.v).sum(), x, create_graph=True)[0]


def complex_of(square: Tensor) -> Tensor:
    """``[D, D / 2]``: pairs of real numbers, as a layer of a Fourier neural operator keeps its own
    where complex parameters need ``mode="one_by_one"``."""
    return torch.view_as_complex(square.unflatten(1, (-1, 2)))


def heads(m: Any, x: Tensor) -> Tensor:
    keys = m.keys[None].expand(len(x), -1, -1)
    return F.scaled_dot_product_attention(x, keys, keys * 2)


def far(x: Tensor) -> Tensor:
    return (x[..., 0].abs() * 5).long().clamp(max=6)


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    # complex values
    "view_as_complex": lambda m, x: x * torch.view_as_complex(m.pair).real,
    "complex_product": lambda m, x: x * torch.view_as_complex(m.pair),
    "complex_slice": lambda m, x: x * torch.view_as_complex(m.pair)[:1].abs(),
    "complex_parts": lambda m, x: x * torch.complex(m.v, m.w),
    "polar": lambda m, x: x * torch.polar(m.v.exp(), m.w),
    "complex_sum": lambda m, x: torch.add(x, torch.view_as_complex(m.pair), alpha=2),
    "fourier": lambda m, x: torch.fft.irfft(
        torch.fft.rfft(x, dim=1) * torch.view_as_complex(m.pair), n=T, dim=1
    ),
    "fourier_einsum": lambda m, x: torch.fft.irfft(
        torch.einsum("bki,io->bko", torch.fft.rfft(x, dim=1), complex_of(m.square)), n=T, dim=1
    ).repeat(1, 1, 2),
    # transforms of torch.func, and calls with other parameters
    "vmap": lambda m, x: torch.func.vmap(lambda row: row @ m.square)(x),
    "vmap_over_it": lambda m, x: torch.func.vmap(lambda w: x @ w)(m.square).permute(1, 2, 0),
    "jvp": lambda m, x: torch.func.jvp(lambda y: torch.tanh(y * m.v), (x,), (torch.ones_like(x),))[
        1
    ],
    "grad": lambda m, x: torch.func.grad(lambda y: torch.tanh(y * m.v).sum())(x),
    "autograd_grad": energy_gradient,
    "functional_call": lambda m, x: torch.func.functional_call(
        m.linear, {"weight": m.square, "bias": m.v}, (x,)
    ),
    # past the stand-in
    "autograd_function": lambda m, x: Scaling.apply(x, m.v),
    "scripted": lambda m, x: scripted(x, m.v),
    "as_subclass": lambda m, x: x * m.v.as_subclass(Tensor),
    "compiled": lambda m, x: torch.compile(torch.mul, backend="eager")(x, m.v),
    "aten": lambda m, x: torch.ops.aten.mul.Tensor(x, m.v),
    "checkpoint": lambda m, x: checkpoint(lambda y: y * m.v, x, use_reentrant=False),
    "reentrant_checkpoint": lambda m, x: checkpoint(lambda y: y * m.v, x, use_reentrant=True),
    # written into other tensors
    "copied": copied,
    "added_in_place": added_in_place,
    "diagonal": diagonal,
    "slices_written": slices_written,
    "masked_tokens": masked_tokens,
    "own_rows_in_place": own_rows_in_place,
    "scatter": lambda m, x: x.scatter_add(
        1, torch.zeros(len(x), 1, D, dtype=torch.long), m.token.expand(len(x), -1, -1)
    ),
    "index_put": lambda m, x: (
        x @ torch.zeros(D, D, dtype=x.dtype).index_put((torch.arange(D), torch.arange(D)), m.v)
    ),
    # beside other parameters and constants
    "another_modules": lambda m, x: m.linear(x) + x * (m.v * m.linear.bias),
    "where_another_modules": lambda m, x: (
        m.linear(x) + x * torch.where(m.v > 0, m.v, m.linear.bias)
    ),
    "function_of_a_childs": lambda m, x: F.linear(x, m.linear.weight, m.v),
    "function_of_a_childs_alone": lambda m, x: F.linear(x, m.linear.weight),
    "past_functions_of_a_childs": lambda m, x: Scaling.apply(x, m.linear.bias),
    "functional_call_of_computed": lambda m, x: torch.func.functional_call(
        m.linear, {"weight": m.linear.weight * 2}, (x,)
    ),
    "stacked": lambda m, x: x * torch.stack([m.v, m.w]).sum(0),
    "stacked_beside_samples": lambda m, x: torch.stack([m.v.expand_as(x), x], 1).sum(1),
    "list": lambda m, x: x * m.items[0] + m.items[-1],
    "read_as_data": lambda m, x: x * m.v.data + x * m.w.detach() + x * m.v.tolist()[0] + m.v[0],
    "with_gradients_off": lambda m, x: x * without_grad(lambda: m.v * 1) + m.w,
    "with_gradients_off_in_part": lambda m, x: x * (m.v / without_grad(lambda: m.v.norm())),
    "with_gradients_off_beside": lambda m, x: torch.addcmul(m.w, x, without_grad(lambda: m.v + 1)),
    "dtype_of_it": lambda m, x: x.type_as(m.v) * m.v,
    "alpha": lambda m, x: torch.add(m.v, torch.add(x, m.w, alpha=3), alpha=2),
    # operators
    "solve": lambda m, x: torch.linalg.solve(m.square, x.mT).mT,
    "cosine": lambda m, x: (
        x * F.cosine_similarity(x, m.token.expand(len(x), T, -1), dim=-1)[..., None]
    ),
    "einsum_by_row": lambda m, x: (
        x * torch.einsum("btd,btd->bt", x, m.token.expand(len(x), T, -1))[..., None]
    ),
    "attention_keys": heads,
    "attention_function": attention,
    "gathered": lambda m, x: (
        x + torch.gather(m.keys[None].expand(len(x), -1, -1), 1, (x.abs() * 3).long().clamp(max=6))
    ),
    "looked_up": lambda m, x: x + m.keys[far(x)] + F.embedding(far(x), m.keys),
    "looked_up_padded": lambda m, x: x + F.embedding(far(x), m.keys, padding_idx=0),
    "where": lambda m, x: torch.where(x > 0, m.v, x),
    "grid_sample": lambda m, x: (
        x
        * F.grid_sample(
            m.square[None, None].expand(len(x), -1, -1, -1),
            torch.tanh(x[..., :2])[:, None],
            align_corners=False,
        )[:, 0].mT
    ),
    "convolution": lambda m, x: F.conv1d(x.mT, m.kernel, m.v, padding=1).mT,
    "group_norm": lambda m, x: F.group_norm(x.mT, 2, m.v, m.w).mT,
    "decomposed": lambda m, x: x @ torch.linalg.qr(m.square)[0] * torch.linalg.svd(m.square).S,
}


def all_kinds(use: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Holder(
        use,
        v=torch.randn(D),
        w=torch.randn(D),
        pair=torch.randn(D, 2),
        square=torch.randn(D, D) * 0.5,
        big=torch.randn(3 * D, D) * 0.3,
        token=torch.randn(1, 1, D),
        keys=torch.randn(7, D),
        kernel=torch.randn(D, D, 3) * 0.3,
        linear=nn.Linear(D, D),
        items=nn.ParameterList([nn.Parameter(torch.randn(D)) for _ in range(2)]),
    )


@pytest.mark.parametrize("mode, wrapper", [("one_pass", "wrapped"), ("two_pass", "hooks")])
@pytest.mark.parametrize("name", USES)
def test_use_of_a_parameter_is_exact(name: str, mode: str, wrapper: str) -> None:
    if name in ("scripted", "compiled") and RELEASE < (2, 13):
        pytest.skip("PyTorch before 2.13: refused in backward, or fails in torch.compile")
    exact(all_kinds(USES[name]), seeded_batch(), mode, wrapper)


REFUSED_USES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "functional_call_of_samples": (
        lambda m, x: torch.func.functional_call(m.linear, {"weight": x[0].mT @ x[0]}, (x,)),
        r"middle\.linear \(Linear\): its weight is a tensor that was computed",
    ),
    "mean_over_the_batch": (
        lambda m, x: x * (torch.tanh(x).mean() * m.v),
        r"FC143 middle \(Holder\): ",
    ),
    "batch_norm": (
        lambda m, x: F.batch_norm(x.mT, None, None, m.v, m.w, training=True).mT,
        r"middle \(Holder\): calls batch_norm.*others",
    ),
    "masked_scatter": (
        lambda m, x: x.masked_scatter(x > 0, m.v.expand_as(x)),
        r"middle \(Holder\): calls masked_scatter.*others",
    ),
    "frequencies": (
        lambda m, x: x + F.embedding(far(x), m.keys, scale_grad_by_freq=True),
        r"middle \(Holder\): calls embedding\(scale_grad_by_freq=True\)",
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REFUSED_USES)
def test_use_of_a_parameter_is_refused_by_name(name: str, mode: str) -> None:
    use, message = REFUSED_USES[name]
    model = make_around(all_kinds(use))
    flash = WRAPPERS["wrapped"](model, mode=mode, strict=False)
    with raises("FC101|FC141|FC143", match=message):
        squares(flash, seeded_batch()).backward()


def test_complex_parameter_is_refused_and_the_model_left_as_it_was() -> None:
    model = make_around(lambda: Holder(lambda m, x: x * m.c.abs()))
    model.middle.c = nn.Parameter(torch.randn(D, dtype=torch.complex128))
    with raises("FC115", match=r"middle\.c"):
        WRAPPERS["wrapped"](model, strict=False)
    assert all("forward" not in vars(module) for module in model.modules())
    model.middle.c.requires_grad_(False)
    flash = WRAPPERS["wrapped"](model, strict=False)
    squares(flash, seeded_batch()).backward()
    model.middle.c.requires_grad_(True)
    with raises("FC115", match=r"middle\.c"):
        flash(*seeded_batch())


def test_what_gets_past_all_functions_is_noticed_in_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The net below the others: as if the look at the first forward's graph found nothing, and
    nobody had compared gradients."""
    monkeypatch.setattr("flash_clipping.capture.proof.gate.Gate.examine", lambda *_: None)
    monkeypatch.setattr("flash_clipping.capture.tap.refuse_bypassed", lambda *_: None)
    model = make_around(all_kinds(USES["autograd_function"]))
    flash = WRAPPERS["wrapped"](model, strict=False)
    with raises("FC140", match=r"middle \(Holder\): .*autograd.Function"):
        squares(flash, seeded_batch()).backward()
    # What is computed from a parameter comes out as an ordinary tensor, by a mistake of ours.
    monkeypatch.setattr(proxies.ParameterProxy, "wrap", staticmethod(lambda value, *_: value))
    model = make_around(all_kinds(lambda m, x: x * m.v.exp()))
    flash = WRAPPERS["wrapped"](model, strict=False)
    with raises("FC140", match=r"middle \(Holder\)"):
        squares(flash, seeded_batch()).backward()
