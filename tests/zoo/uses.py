"""Uses of parameters by a module itself: whatever it computes with them, and wherever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.uses import D, Scaling, T
from tests.zoo.case import ModelCase, around


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


def masked_tokens(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[x[..., 0] > 0] = m.v
    return y


def own_rows_in_place(m: Any, x: Tensor) -> Tensor:
    rows = m.token.expand(len(x), -1, -1) * 1
    rows.mul_(3)
    return torch.cat([rows, x], 1)


def attention_of_function(m: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return F.multi_head_attention_forward(
        x, x, x, D, 2, m.big, None, None, None, False, 0.0, m.square, m.v
    )[0].transpose(0, 1)


def energy_gradient(m: Any, x: Tensor) -> Tensor:
    return torch.autograd.grad(torch.tanh(x * m.v).sum(), x, create_graph=True)[0]


def heads(m: Any, x: Tensor) -> Tensor:
    keys = m.keys[None].expand(len(x), -1, -1)
    return F.scaled_dot_product_attention(x, keys, keys * 2)


def far(x: Tensor) -> Tensor:
    return (x[..., 0].abs() * 5).long().clamp(max=6)


def inplace_rebinding(m: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    x += m.v
    x += m.items[0] - m.token
    return x


def in_place_of_rows(m: Any, x: Tensor) -> Tensor:
    """Positions as axial embeddings make them: nothing tells that their rows are all the same."""
    x = x * 1.0
    x += m.token[None].expand(len(x), 1, T, D).reshape(len(x), T, D)
    return x


def made_in_place(m: Any, x: Tensor) -> Tensor:
    """Changed where it is: what a function returns is dropped."""
    made = m.v * 2.0
    made.add_(m.items[0])
    made.mul_(1 - m.temperature)
    return x + made


def written_under_a_mask(m: Any, x: Tensor) -> Tensor:
    """Frames of Wav2Vec2, of which some positions are taken out."""
    x = x * 1.0
    x[x.detach()[..., 0] > 0] = m.v.to(x.dtype)
    return x


def written_under_a_mask_of_samples(m: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    x[x.detach()[:, 0, 0] > 0] = m.v.to(x.dtype)
    return x


def in_place_result_dropped(m: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    x.mul_(m.v)
    return x


def written_into(m: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    x[:, 0] = m.v
    return x


def written_through_a_view(m: Any, x: Tensor) -> Tensor:
    made = m.v * 2.0
    made[None].add_(m.items[0])
    return x + made


def class_token_written(m: Any, x: Tensor) -> Tensor:
    """What is repeated for samples may be changed in place, as samples may."""
    token = m.token.repeat(len(x), 1, 1)
    token[:, 0, 1:] = x[:, 0, 1:]
    return x * token


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    # complex values
    "view_as_complex": lambda m, x: x * torch.view_as_complex(m.pair).real,
    "complex_product": lambda m, x: x * torch.view_as_complex(m.pair),
    "complex_parts": lambda m, x: x * torch.complex(m.v, m.w),
    "fourier": lambda m, x: torch.fft.irfft(
        torch.fft.rfft(x, dim=1) * torch.view_as_complex(m.pair), n=T, dim=1
    ),
    # transforms of torch.func, and calls with other parameters
    "vmap": lambda m, x: torch.func.vmap(lambda row: row @ m.square)(x),
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
    "function_of_a_childs": lambda m, x: F.linear(x, m.linear.weight, m.v),
    "past_functions_of_a_childs": lambda m, x: Scaling.apply(x, m.linear.bias),
    "functional_call_of_computed": lambda m, x: torch.func.functional_call(
        m.linear, {"weight": m.linear.weight * 2}, (x,)
    ),
    "stacked": lambda m, x: x * torch.stack([m.v, m.w]).sum(0),
    "read_as_data": lambda m, x: x * m.v.data + x * m.w.detach() + x * m.v.tolist()[0] + m.v[0],
    "with_gradients_off": lambda m, x: x * without_grad(lambda: m.v * 1) + m.w,
    "with_gradients_off_in_part": lambda m, x: x * (m.v / without_grad(lambda: m.v.norm())),
    "dtype_of_it": lambda m, x: x.type_as(m.v) * m.v,
    "alpha": lambda m, x: torch.add(m.v, torch.add(x, m.w, alpha=3), alpha=2),
    # operators
    "solve": lambda m, x: torch.linalg.solve(m.square, x.mT).mT,
    "attention_keys": heads,
    "attention_function": attention_of_function,
    "gathered": lambda m, x: (
        x + torch.gather(m.keys[None].expand(len(x), -1, -1), 1, (x.abs() * 3).long().clamp(max=6))
    ),
    "looked_up": lambda m, x: x + m.keys[far(x)] + F.embedding(far(x), m.keys),
    "where": lambda m, x: torch.where(x > 0, m.v, x),
    "convolution": lambda m, x: F.conv1d(x.mT, m.kernel, m.v, padding=1).mT,
    "group_norm": lambda m, x: F.group_norm(x.mT, 2, m.v, m.w).mT,
    "decomposed": lambda m, x: x @ torch.linalg.qr(m.square)[0] * torch.linalg.svd(m.square).S,
    "added": lambda m, x: x + m.v,
    "subtracted": lambda m, x: m.v - x,
    "divided": lambda m, x: x / (m.v.exp() + torch.linspace(-1, 1, D)),
    "multiplied": lambda m, x: x * m.v,
    "class_token": lambda m, x: torch.cat([m.token.expand(x.shape[0], -1, -1), x], dim=1),
    "class_token_repeat": lambda m, x: torch.cat([m.token.repeat(x.shape[0], 2, 1), x], dim=1),
    "expanded_like": lambda m, x: torch.cat([x, m.token.expand_as(x)], dim=1),
    "class_token_written": class_token_written,
    "as_many_positions_as_samples": lambda m, x: x[:, :4] + m.v.expand(4, D),
    "positions": lambda m, x: x + m.positions(x.shape[1]),
    "temperature": lambda m, x: torch.softmax(x * m.temperature.exp(), dim=-1),
    "matrix": lambda m, x: x @ m.square,
    "einsum": lambda m, x: torch.einsum("btd,de->bte", x, m.square * m.v),
    "layer_norm_function": lambda m, x: F.layer_norm(x, (D,), m.v, m.items[0]),
    "twice": lambda m, x: (x + m.v) * m.v,
    "several": lambda m, x: torch.addcmul(m.items[0].expand_as(x), x, m.v),
    "prompt": lambda m, x: torch.cat(
        [torch.tanh(m.token @ m.square).expand(x.shape[0], 3, -1), x], 1
    ),
    "rebinding": inplace_rebinding,
    "in_place_of_rows": in_place_of_rows,
    "made_in_place": made_in_place,
    "masked_rows": written_under_a_mask,
    "masked_samples": written_under_a_mask_of_samples,
    "checkpointed_arguments": lambda m, x: checkpoint(
        lambda x, v, w: torch.tanh(x * v + w), x, m.v, m.token, use_reentrant=False
    ),
    "reentrant_arguments": lambda m, x: checkpoint(
        lambda x, v, w: torch.tanh(x * v + w), x, m.v, m.token, use_reentrant=True
    ),
    "autograd_function_of_derived": lambda m, x: Scaling.apply(x, m.v.exp()),
    "layer_on_parameters_alone": lambda m, x: x + m.linear(m.square)[0],
    "in_place_result_dropped": in_place_result_dropped,
    "written_into": written_into,
    "written_through_a_view": written_through_a_view,
}


class Positions(nn.Module):
    """Returns parameters only: nothing that it is called with carries samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, D) * 0.3)

    def forward(self, length: int) -> Tensor:
        return self.table[:length]


def all_kinds() -> dict[str, Any]:
    """What the uses above find."""
    return {
        "v": torch.randn(D),
        "w": torch.randn(D),
        "pair": torch.randn(D, 2),
        "square": torch.randn(D, D) * 0.5,
        "big": torch.randn(3 * D, D) * 0.3,
        "token": torch.randn(1, 1, D),
        "keys": torch.randn(7, D),
        "kernel": torch.randn(D, D, 3) * 0.3,
        "temperature": torch.tensor(0.3),
        "linear": nn.Linear(D, D),
        "positions": Positions(),
        "items": nn.ParameterList([nn.Parameter(torch.randn(D)) for _ in range(2)]),
    }


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
        r"the outputs of a sample change with the others",
    ),
    "frequencies": (
        lambda m, x: x + F.embedding(far(x), m.keys, scale_grad_by_freq=True),
        r"middle \(Holder\): calls embedding\(scale_grad_by_freq=True\)",
    ),
}


#: No stand-in can follow a parameter there. Each is exact where samples run one at a time.
ALONE = ("vmap", "grad", "autograd_function", "scripted", "as_subclass", "copied", "written_into")
ALONE += ("past_functions_of_a_childs", "reentrant_arguments", "autograd_function_of_derived")
ALONE += ("written_through_a_view",)


def dropped_out(m: Any, x: Tensor) -> Tensor:
    """Of samples, and of a parameter: once for all samples."""
    return F.dropout(x * m.v, 0.5) + F.dropout(m.v, 0.5)


#: What the ways do not run: PyTorch refuses a checkpoint or a compiler around it.
NOT_INSIDE = ("checkpointed", "compiled")
WITHOUT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(["checkpointed_arguments", "autograd_grad"], NOT_INSIDE),
    **dict.fromkeys(["functional_call", "functional_call_of_computed"], ("compiled",)),
    **dict.fromkeys(["decomposed", "in_place_result_dropped"], ("compiled",)),
    "compiled": ("compiled",),
    # Its copies of samples, or of a parameter, have another dtype then.
    **dict.fromkeys(["masked_tokens", "scatter", "index_put"], ("autocast",)),
    # Numbers of rows that follow from values, of which none is finite.
    **dict.fromkeys(["gathered", "looked_up"], ("empty",)),
}

CASES: dict[str, ModelCase] = {
    **{
        name: around(use, all_kinds, without=WITHOUT.get(name, ()))
        for name, use in USES.items()
        if name not in ALONE
    },
    **{name: around(USES[name], all_kinds, refused="FC140", alone=True) for name in ALONE},
    **{
        name: around(use, all_kinds, refused="FC101|FC141|FC143|FC202", match=match)
        for name, (use, match) in REFUSED_USES.items()
    },
    "dropout": around(dropped_out, all_kinds, draws=True),
}
