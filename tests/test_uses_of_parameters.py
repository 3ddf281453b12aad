"""Whatever a model does with its parameters: exact against one sample at a time in float64, or
refused by name. Never a model that silently learns nothing, or something else."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from flash_clipping import Dense, FlashClippingError, Rule, register_rule
from flash_clipping.capture import bare
from flash_clipping.rules import registry
from tests.oracle import Truth, assert_close
from tests.test_shared_parameters import MODES, WRAPPERS, mean_squares, truth_by_autograd

B, T, D = 4, 5, 6
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
Batch = tuple[Tensor, ...]

pytestmark = pytest.mark.filterwarnings("ignore:.*vmap cannot run this module")


class Holder(nn.Module):
    """Parameters and layers, and a function of them as forward."""

    def __init__(self, use: Callable[..., Tensor], **held: Any):
        super().__init__()
        self.use = use
        for name, value in held.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, Tensor) else value)

    def forward(self, *inputs: Any) -> Any:
        return self.use(self, *inputs)


class Around(nn.Module):
    """Something between two linear layers, whose gradients show what it does to its input's."""

    def __init__(self, middle: nn.Module):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(3, D), middle, nn.Linear(D, 2)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        y = self.middle(torch.tanh(self.first(x)), *others)
        if y.is_complex():
            y = y.real + 2 * y.imag
        return self.head(torch.tanh(y))


def make(middle: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Around(middle()).double()


def floats() -> Batch:
    torch.manual_seed(1)
    return (torch.randn(B, T, 3, dtype=torch.float64),)


#: Every row of the table occurs, the padding of the tests below (2) in every sample.
IDS = torch.tensor([[2, 2, 1, 0, 3], [1, 2, 2, 6, 6], [0, 1, 2, 3, 4], [2, 2, 2, 2, 2]])


def squares(model: Any, batch: Batch) -> Tensor:
    return mean_squares(model(*batch))


def measured(
    model: nn.Module,
    truth: Truth,
    batch: Batch,
    mode: str,
    wrapper: str,
    loss: Callable[[Any, Batch], Tensor] = squares,
    **options: Any,
) -> None:
    """Two steps; norms and clipped sums are the oracle's."""
    bound = truth.norms.median().item()
    flash = WRAPPERS[wrapper](model, max_grad_norm=bound, mode=mode, strict=False, **options)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss(flash if wrapper == "wrapped" else model, batch).backward()
        assert_close(flash.get_norm_sample(), truth.norms, 1e-9, "norms")
        for name, grad in truth.clipped(bound).items():
            found = model.get_parameter(name).grad
            assert found is not None and found.dtype == grad.dtype
            scale = grad.abs().max().clamp(min=1e-3)
            assert (found - grad).abs().max() <= 1e-8 * scale, name


def exact(
    middle: Callable[[], nn.Module], batch: Batch, mode: str, wrapper: str, **options: Any
) -> None:
    truth = truth_by_autograd(make(middle), batch, squares)
    measured(make(middle), truth, batch, mode, wrapper, **options)


# -- parameters in a module's own forward ------------------------------------------------------


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        return G * gain, (G * x).flatten(0, -2).sum(0)


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
    exact(all_kinds(USES[name]), floats(), mode, wrapper)


REFUSED_USES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "function_of_a_childs": (
        lambda m, x: F.linear(x, m.linear.weight),
        r"middle\.linear\.weight: .*Freeze it.*LoRA",
    ),
    "functional_call_of_computed": (
        lambda m, x: torch.func.functional_call(m.linear, {"weight": m.linear.weight * 2}, (x,)),
        r"middle\.linear \(Linear\): its weight is a tensor that was computed",
    ),
    "mean_over_the_batch": (
        lambda m, x: x * (torch.tanh(x).mean() * m.v),
        r"middle \(Holder\): .*mixes samples",
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
    model = make(all_kinds(use))
    flash = WRAPPERS["wrapped"](model, mode=mode, strict=False)
    with pytest.raises(FlashClippingError, match=message):
        squares(flash, floats()).backward()


def test_complex_parameter_is_refused_and_the_model_left_as_it_was() -> None:
    model = make(lambda: Holder(lambda m, x: x * m.c.abs()))
    model.middle.c = nn.Parameter(torch.randn(D, dtype=torch.complex128))
    with pytest.raises(FlashClippingError, match=r"middle\.c: a complex .*view_as_complex"):
        WRAPPERS["wrapped"](model, strict=False)
    assert all("forward" not in vars(module) for module in model.modules())
    model.middle.c.requires_grad_(False)
    flash = WRAPPERS["wrapped"](model, strict=False)
    squares(flash, floats()).backward()
    model.middle.c.requires_grad_(True)
    with pytest.raises(FlashClippingError, match=r"middle\.c: a complex"):
        flash(*floats())


def test_what_gets_past_all_functions_is_noticed_in_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The net below the others: as if the look at the first forward's graph found nothing."""
    monkeypatch.setattr("flash_clipping.capture.tap.refuse_bypassed", lambda *_: None)
    model = make(all_kinds(USES["autograd_function"]))
    flash = WRAPPERS["wrapped"](model, strict=False)
    with pytest.raises(FlashClippingError, match=r"middle \(Holder\): .*autograd.Function"):
        squares(flash, floats()).backward()
    # What is computed from a parameter comes out as an ordinary tensor, by a mistake of ours.
    monkeypatch.setattr(bare.BareParameter, "wrap", staticmethod(lambda value, *_: value))
    model = make(all_kinds(lambda m, x: x * m.v.exp()))
    flash = WRAPPERS["wrapped"](model, strict=False)
    with pytest.raises(FlashClippingError, match=r"middle \(Holder\)"):
        squares(flash, floats()).backward()


# -- weights that something else computes ------------------------------------------------------


def without(layer: nn.Module, name: str = "weight") -> nn.Module:
    delattr(layer, name)
    return layer


def assigned(m: Any, x: Tensor, *ids: Tensor) -> Tensor:
    m.layer.weight = m.source.tanh()
    return m.layer(x)


def in_dict(m: Any, x: Tensor) -> Tensor:
    vars(m.layer)["weight"] = m.source.tanh()
    return m.layer(x)


def shadowed(m: Any, x: Tensor) -> Tensor:
    vars(m.layer)["weight"] = m.source.tanh()
    try:
        return m.layer(x)
    finally:
        del vars(m.layer)["weight"]


def convolved(m: Any, x: Tensor) -> Tensor:
    return assigned(m, x.mT).mT


def looked_up(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + assigned(m, ids)


def attended(m: Any, x: Tensor) -> Tensor:
    m.layer.in_proj_weight = m.source.tanh()
    return m.layer(x, x, x)[0]


def with_none() -> nn.Module:
    layer = without(nn.Linear(D, D))
    layer.weight = None
    return layer


def with_buffer() -> nn.Module:
    layer = without(nn.Linear(D, D))
    layer.register_buffer("weight", torch.zeros(D, D))
    return layer


class ReadsAnother(nn.Linear):
    """Its weight is a property that computes it from a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.register_parameter("base", nn.Parameter(self._parameters.pop("weight")))

    @property
    def weight(self) -> Tensor:
        return torch.tanh(self.base)

    @weight.setter
    def weight(self, value: Any) -> None:
        self._parameters["weight"] = value


def attention_layer() -> nn.Module:
    return nn.MultiheadAttention(D, 2, batch_first=True)


def self_attention(m: Any, x: Tensor) -> Tensor:
    return m.layer(x, x, x)[0]


def normed_output() -> nn.Module:
    layer = attention_layer()
    parametrizations.weight_norm(layer.out_proj)
    return layer


def plainly(m: Any, x: Tensor) -> Tensor:
    return m.layer(x)


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "assigned": lambda: Holder(assigned, layer=without(nn.Linear(D, D)), source=torch.randn(D, D)),
    "assigned_none": lambda: Holder(assigned, layer=with_none(), source=torch.randn(D, D)),
    "assigned_buffer": lambda: Holder(assigned, layer=with_buffer(), source=torch.randn(D, D)),
    "in_dict": lambda: Holder(in_dict, layer=without(nn.Linear(D, D)), source=torch.randn(D, D)),
    "shadowed": lambda: Holder(shadowed, layer=nn.Linear(D, D), source=torch.randn(D, D)),
    "convolution": lambda: Holder(
        convolved, layer=without(nn.Conv1d(D, D, 3, padding=1)), source=torch.randn(D, D, 3)
    ),
    "norm": lambda: Holder(assigned, layer=without(nn.LayerNorm(D)), source=torch.randn(D)),
    "embedding": lambda: Holder(
        looked_up, layer=without(nn.Embedding(7, D)), source=torch.randn(7, D)
    ),
    "attention": lambda: Holder(
        attended, layer=without(attention_layer(), "in_proj_weight"), source=torch.randn(3 * D, D)
    ),
    "property": lambda: Holder(plainly, layer=ReadsAnother()),
    "weight_norm": lambda: Holder(plainly, layer=parametrizations.weight_norm(nn.Linear(D, D))),
    "orthogonal": lambda: Holder(plainly, layer=parametrizations.orthogonal(nn.Linear(D, D))),
    "attention_weight_norm": lambda: Holder(
        self_attention, layer=parametrizations.weight_norm(attention_layer(), "in_proj_weight")
    ),
    "attention_output_weight_norm": lambda: Holder(self_attention, layer=normed_output()),
}


@pytest.mark.parametrize("mode, wrapper", [("one_pass", "wrapped"), ("two_pass", "hooks")])
@pytest.mark.parametrize("name", COMPUTED)
def test_computed_weight_is_exact(name: str, mode: str, wrapper: str) -> None:
    batch = (*floats(), IDS) if name == "embedding" else floats()
    exact(COMPUTED[name], batch, mode, wrapper)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "change",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ],
    ids=["weight_norm", "spectral_norm", "prune"],
)
def test_weight_of_a_hook_is_refused(change: Callable[[nn.Module], nn.Module]) -> None:
    model = make(lambda: Holder(plainly, layer=change(nn.Linear(D, D))))
    flash = WRAPPERS["wrapped"](model, strict=False)
    with pytest.raises(FlashClippingError, match=r"(?s)middle\.layer .*parametrizations"):
        squares(flash, floats()).backward()


# -- what a layer with a rule is called with ---------------------------------------------------


def bags(**options: Any) -> nn.Module:
    return nn.EmbeddingBag(7, D, **options)


def starts(ids: Tensor) -> Tensor:
    return torch.arange(len(ids)) * T


def weights_of(ids: Tensor) -> Tensor:
    return torch.linspace(0.2, 1.7, T, dtype=torch.float64) * (1 + ids)


def masked_attention(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    mask = (ids == 1) & (torch.arange(T) > 0)
    return m.layer(value=x, query=x, key=x * 2, key_padding_mask=mask, need_weights=False)[0]


CALLS: dict[str, Callable[[], nn.Module]] = {
    "weights": lambda: Holder(
        lambda m, x, i: x + m.layer(i, per_sample_weights=weights_of(i))[:, None],
        layer=bags(mode="sum"),
    ),
    "offsets": lambda: Holder(
        lambda m, x, i: x + m.layer(i.reshape(-1), offsets=starts(i))[:, None], layer=bags()
    ),
    "all_of_a_bag": lambda: Holder(
        lambda m, x, i: (
            x
            + m.layer(
                per_sample_weights=weights_of(i).reshape(-1),
                offsets=starts(i),
                input=i.reshape(-1),
            )[:, None]
        ),
        layer=bags(mode="sum", padding_idx=2),
    ),
    "linear": lambda: Holder(lambda m, x, i: m.layer(input=x), layer=nn.Linear(D, D)),
    "norm": lambda: Holder(lambda m, x, i: m.layer(input=x), layer=nn.LayerNorm(D)),
    "rms_norm": lambda: Holder(lambda m, x, i: m.layer(x=x), layer=nn.RMSNorm(D)),
    "convolution": lambda: Holder(
        lambda m, x, i: m.layer(input=x.mT).mT, layer=nn.Conv1d(D, D, 3, padding=1)
    ),
    "embedding": lambda: Holder(lambda m, x, i: x + m.layer(input=i), layer=nn.Embedding(7, D)),
    "attention": lambda: Holder(masked_attention, layer=attention_layer()),
    "learned_keys": lambda: Holder(
        lambda m, x, i: m.layer(
            x, m.key.expand(len(x), -1, -1), value=m.key.expand(len(x), -1, -1)
        )[0],
        layer=attention_layer(),
        key=torch.randn(1, 3, D),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_arguments_by_name_are_not_lost(name: str, mode: str) -> None:
    exact(CALLS[name], (*floats(), IDS), mode, "wrapped")


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor, shift: Any = None, *, scale: float = 1.0) -> Tensor:
        return x * self.gain * scale + (0 if shift is None else shift)


class GainRule(Rule):
    def forward(self, layer: Any, x: Tensor, shift: Any = None) -> tuple[Tensor, tuple[Any, ...]]:
        return x * layer.gain + (0 if shift is None else shift), (x, layer.gain)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: Any) -> Any:
        x, gain = saved
        return grad_output * gain, {"gain": Dense((grad_output * x).sum(1))}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m, x: m.layer(x, scale=2.0), r"middle\.layer \(Gain\): .*'scale'"),
        (lambda m, x: m.layer(x, shift=x), r"middle\.layer \(Gain\): .*no gradient for input 1"),
        (lambda m, x: m.layer(x, [x]), r"middle\.layer \(Gain\): .*a list of tensors"),
    ],
    ids=["keyword", "input", "list"],
)
def test_what_a_rule_does_not_take_is_refused(
    call: Callable[[Any, Tensor], Tensor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_RULES", registry._RULES.copy())
    register_rule(Gain)(GainRule)
    model = make(lambda: Holder(call, layer=Gain()))
    flash = WRAPPERS["wrapped"](model)
    with pytest.raises(FlashClippingError, match=message):
        squares(flash, floats()).backward()


# -- the generic rule --------------------------------------------------------------------------


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2


PADDED: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.Embedding(7, D, padding_idx=2),
    "subclass": lambda: Scaled(7, D, padding_idx=2),
    "function": lambda: Holder(
        lambda m, i: F.embedding(i, m.table, padding_idx=2) * m.v,
        table=torch.randn(7, D),
        v=torch.randn(D),
    ),
    "negative": lambda: Holder(lambda m, i: F.embedding(i, m.table, -5), table=torch.randn(7, D)),
    "aten": lambda: Holder(lambda m, i: torch.embedding(m.table, i, 2), table=torch.randn(7, D)),
    "bag": lambda: Holder(
        lambda m, i: F.embedding_bag(i, m.table, padding_idx=2, mode="sum")[:, None],
        table=torch.randn(7, D),
    ),
}


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("name", PADDED)
def test_padding_is_not_trained(name: str, force: bool) -> None:
    def middle() -> nn.Module:
        return Holder(lambda m, x, i: x + m.layer(i), layer=PADDED[name]())

    truth = truth_by_autograd(make(middle), (*floats(), IDS), squares)
    (table,) = [g for n, g in truth.grads.items() if g.shape[1:] == (7, D)]
    assert table[:, 2].abs().max() == 0 < table[:, 1].abs().max()
    measured(make(middle), truth, (*floats(), IDS), "one_pass", "wrapped", force_functorch=force)


@dataclasses.dataclass
class Data:
    a: Any
    b: Any = None


def test_objects_are_refused_by_the_generic_rule() -> None:
    """One sample would get, or give, the tensors of all."""
    returning = make(lambda: Holder(lambda m, x: m.inner(x).a, inner=Returning()))
    with pytest.raises(FlashClippingError, match=r"inner \(Returning\): .*returns a Data"):
        WRAPPERS["wrapped"](returning, force_functorch=True)(*floats())
    taking = make(lambda: Holder(lambda m, x: m.inner(Data(x), x), inner=Taking()))
    with pytest.raises(FlashClippingError, match=r"inner \(Taking\): .*called with a Data"):
        WRAPPERS["wrapped"](taking, force_functorch=True)(*floats())


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Data:
        return Data(x * self.gain)


class Taking(Returning):
    def forward(self, data: Data, x: Tensor) -> Any:  # type: ignore[override]
        return x * self.gain + data.a


# -- what the model returns --------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Slotted:
    a: Any
    b: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any


Named = collections.namedtuple("Named", "a b")


def pack_of_model_output(y: Tensor, z: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return y, BaseModelOutput(last_hidden_state=z)


Pack = Callable[[Tensor, Tensor], Any]
Unpack = Callable[[Any], tuple[Tensor, Tensor]]
OPEN: dict[str, tuple[Pack, Unpack]] = {
    "dataclass": (Data, lambda o: (o.a, o.b)),
    "in_a_tuple": (lambda y, z: (y, Data(z)), lambda o: (o[0], o[1].a)),
    "in_a_dict": (
        lambda y, z: {"y": y, "z": {"q": Data([z])}},
        lambda o: (o["y"], o["z"]["q"].a[0]),
    ),
    "in_a_dataclass": (lambda y, z: Data(Data(y), [Data(z)]), lambda o: (o.a.a, o.b[0].a)),
    "named_tuple": (lambda y, z: Named(y, Data(z)), lambda o: (o.a, o.b.a)),
    "object": (lambda y, z: [y, types.SimpleNamespace(a=z)], lambda o: (o[0], o[1].a)),
    "slots": (lambda y, z: (y, Slotted(z)), lambda o: (o[0], o[1].a)),
    "frozen": (lambda y, z: (y, Frozen(z)), lambda o: (o[0], o[1].a)),
    "user_dict": (
        lambda y, z: collections.UserDict(y=y, z=[z]),
        lambda o: (o["y"], o["z"][0]),
    ),
    "distribution": (
        lambda y, z: (y, torch.distributions.Normal(z, 1.0)),
        lambda o: (o[0], o[1].loc),
    ),
    "twice": (lambda y, z: (y, Data(y), Data(z)), lambda o: (o[1].a, o[2].a + 0 * o[0].sum())),
    "model_output": (pack_of_model_output, lambda o: (o[0], o[1].last_hidden_state)),
}
CLOSED: dict[str, tuple[Pack, Unpack]] = {
    "closure": (lambda y, z: (y, lambda: z), lambda o: (o[0], o[1]())),
    "set": (lambda y, z: (y, {z}), lambda o: (o[0], next(iter(o[1])))),
    "only_a_closure": (lambda y, z: lambda: (y, z), lambda o: o()),
}


class Returns(nn.Module):
    def __init__(self, pack: Pack):
        super().__init__()
        self.pack = pack
        self.first, self.a, self.b = nn.Linear(3, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))
        return self.pack(self.a(h), self.b(h))


def make_returns(pack: Pack) -> nn.Module:
    torch.manual_seed(0)
    return Returns(pack).double()


def loss_of(unpack: Unpack) -> Callable[[Any, Batch], Tensor]:
    def loss(model: Any, batch: Batch) -> Tensor:
        y, z = unpack(model(*batch))
        return mean_squares(y) + mean_squares(torch.tanh(z))

    return loss


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*OPEN, *CLOSED])
def test_outputs_in_objects(name: str, mode: str, wrapper: str) -> None:
    """Exact; under ``two_pass``, in what cannot be opened: refused, with what was found there."""
    pack, unpack = (OPEN | CLOSED)[name]
    loss = loss_of(unpack)
    truth = truth_by_autograd(make_returns(pack), floats(), loss)
    if mode == "two_pass" and name in CLOSED:
        with pytest.raises(FlashClippingError, match=r"two_pass.*(function|set)"):
            measured(make_returns(pack), truth, floats(), mode, wrapper, loss)
    else:
        measured(make_returns(pack), truth, floats(), mode, wrapper, loss)
