"""``mode="one_by_one"``: backwards of a model's own that run layers again, and losses that come to
samples past the model's outputs, beside one sample at a time in float64."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from flash_clipping import Documents
from tests.support.errors import raises
from tests.support.one_sample import (
    Loop,
    assert_clipped,
    check_clipped,
    one_at_a_time,
    seeded,
    wrap,
)
from tests.support.uses import Holder

pytestmark = pytest.mark.filterwarnings("ignore:mode=.one_by_one.")

B, D = 5, 6
X = torch.randn(B, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mlp(inputs: int = D, out: int = D) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, out))


# -- backwards that run layers again ---------------------------------------------------------------


class AdjointMethod(torch.autograd.Function):
    """Euler's steps, whose backward solves the adjoint ODE, as ``torchdiffeq`` does."""

    @staticmethod
    def forward(ctx: Any, func: nn.Module, y: Tensor, *params: Tensor) -> Any:
        ctx.func = func
        ys = [y]
        with torch.no_grad():
            for _ in range(4):
                ys.append(ys[-1] + 0.25 * func(ys[-1]))
        ctx.save_for_backward(*ys, *params)
        return ys[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        *ys, _ = ctx.saved_tensors[:5]
        params = ctx.saved_tensors[5:]
        sums = [torch.zeros_like(p) for p in params]
        for y in reversed(ys):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                found = torch.autograd.grad(
                    ctx.func(y), (y, *params), 0.25 * grad, allow_unused=True
                )
            grad = grad + found[0]
            for own, more in zip(sums, found[1:], strict=True):
                own += 0 if more is None else more
        return None, grad, *sums


class AdjointODE(nn.Module):
    """An ODE between two layers. Its function scales by what the forward has left on it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.func, self.head = nn.Linear(D, D), mlp(), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(AdjointMethod.apply(self.func, self.first(x), *self.func.parameters()))


class Dynamics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.options = mlp(), {"scale": torch.ones(1)}
        self.condition = torch.zeros(())

    def forward(self, y: Tensor) -> Tensor:
        return self.net(y) * self.condition + self.options["scale"]


class Conditioned(AdjointODE):
    """Its function reads what the forward has left of the sample, on itself and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.func = Dynamics()

    def forward(self, x: Tensor) -> Tensor:
        self.func.condition = x.detach().square().mean(1, keepdim=True)
        self.func.options["scale"] = x.detach().sum(1, keepdim=True)
        return super().forward(x)


class ReversibleMethod(torch.autograd.Function):
    """Additive coupling, whose backward computes activations anew and calls ``backward()``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Any) -> Tensor:
        ctx.blocks = blocks
        with torch.no_grad():
            for f, g in blocks:
                x1, x2 = x.chunk(2, 1)
                x1 = x1 + f(x2)
                x = torch.cat([x1, x2 + g(x1)], 1)
        ctx.y = x.detach()
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        y1, y2 = ctx.y.chunk(2, 1)
        d1, d2 = grad.chunk(2, 1)
        for f, g in reversed(ctx.blocks):
            with torch.enable_grad():
                y1 = y1.detach().requires_grad_()
                out = g(y1)
                out.backward(d2)
                y2 = (y2 - out).detach().requires_grad_()
                d1 = d1 + y1.grad
                out = f(y2)
                out.backward(d1)
                y1 = y1.detach() - out.detach()
                d2 = d2 + y2.grad
            y2 = y2.detach()
        return torch.cat([d1, d2], 1), None


class Reversible(nn.Module):
    """``alone``: its blocks hold all of its parameters, so that none is in the graph of a forward;
    ``tied``: a layer is used in blocks and outside of them."""

    def __init__(self, alone: bool = False, tied: bool = False) -> None:
        super().__init__()
        pairs = [nn.ModuleList([mlp(3, 3), mlp(3, 3)]) for _ in range(2)]
        self.blocks = nn.ModuleList(pairs)
        self.first = nn.Identity() if alone else nn.Linear(D, D)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        x = ReversibleMethod.apply(self.first(x), self.blocks)
        return self.blocks[0][1](x[:, :3]) if self.tied else x


class Elsewhere:
    found: Any = None


class ReadsInBackward(nn.Module):
    """What it reads in backward is what its forward has left of the sample."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.head, self.how = nn.Linear(D, D), nn.Linear(D, D), how
        self.nested, self.holder = {"scales": [torch.zeros(())]}, Elsewhere()
        if how == "hook of a module":
            self.first.register_full_backward_hook(
                lambda module, grads, _: (grads[0] * self.scale,)
            )

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        h = self.first(x.clone().requires_grad_())
        if self.how == "hook":
            h.register_hook(lambda grad: grad * self.scale)
        self.scale = self.holder.found = x.detach().square().mean()
        self.nested["scales"][0] = self.scale
        read = {
            "checkpoint": lambda: self.scale,
            "nested": lambda: self.nested["scales"][0],
            "object": lambda: self.holder.found,
            "argument": lambda: given["holder"].found,
        }
        if given is not None:
            given["holder"].found = self.scale
        if (scale := read.get(self.how)) is not None:
            return checkpoint(lambda y: (self.head(y) * scale()).tanh(), h, use_reentrant=False)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: saved,
            lambda saved: saved * self.scale if self.how == "saved" else saved,
        ):
            return self.head(h).tanh()


def squares(model: Any, rows: Sequence[int]) -> Tensor:
    return model(X[[*rows]]).square().sum()


def of_inputs(model: Any, rows: Sequence[int]) -> Tensor:
    return model(X[[*rows]].clone().requires_grad_()).square().sum()


def twins(model: Any, rows: Sequence[int]) -> Tensor:
    x = X[[*rows]]
    return (model(x) - model(x.flip(1))).square().sum()


def with_penalty(model: Any, rows: Sequence[int]) -> Tensor:
    """A penalty on gradients of inputs, taken outside of the model."""
    x = X[[*rows]].clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (grad.norm(dim=1) - 1).square().sum() + out.square().sum()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer(x) ** 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            out = ctx.layer(x) ** 3
            (found,) = torch.autograd.grad(out, x, grad, create_graph=True)
        return found, None


class Cubes(nn.Module):
    """Its gradient by its inputs, in which its layer's weight is, may be derived again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.first(x).tanh(), self.layer)


NESTED: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    "adjoint": (AdjointODE, squares),
    "adjoint twins": (AdjointODE, twins),
    "adjoint of attributes": (Conditioned, squares),
    "reversible": (Reversible, squares),
    "reversible twins": (Reversible, twins),
    "reversible alone": (lambda: Reversible(alone=True), of_inputs),
    "reversible tied": (lambda: Reversible(tied=True), squares),
    "attributes in a hook": (lambda: ReadsInBackward("hook"), squares),
    "attributes in a hook of a module": (lambda: ReadsInBackward("hook of a module"), squares),
    "attributes in a checkpoint": (lambda: ReadsInBackward("checkpoint"), squares),
    "containers in a checkpoint": (lambda: ReadsInBackward("nested"), squares),
    "objects in a checkpoint": (lambda: ReadsInBackward("object"), squares),
    "arguments in a checkpoint": (
        lambda: ReadsInBackward("argument"),
        lambda model, rows: model(X[[*rows]], {"holder": Elsewhere()}).square().sum(),
    ),
    "attributes of twins": (lambda: ReadsInBackward("checkpoint"), twins),
    "attributes where tensors are saved": (lambda: ReadsInBackward("saved"), squares),
    "derived twice": (Cubes, with_penalty),
}


# -- what forward leaves elsewhere than in outputs -------------------------------------------------


class Layers(nn.Module):
    """Leaves losses where ``leave`` puts them."""

    def __init__(self, leave: Callable[..., Any] = lambda *given: None) -> None:
        super().__init__()
        self.first, self.head, self.leave = nn.Linear(D, 8), nn.Linear(8, 2), leave
        self.nested = {"losses": {"first": torch.zeros(())}}

    def forward(self, x: Tensor, losses: Any = None) -> Any:
        h = self.first(x)
        out = self.head(h.tanh())
        self.leave(self, h, out, losses)
        return out


def losses_in(make: Callable[[], Any], read: Callable[[Any], Tensor], calls: int = 1) -> Loop:
    """A loop that gives the model something to leave losses in, and reads them there."""

    def loop(model: Any, rows: Sequence[int]) -> Tensor:
        losses = make()
        out = sum(model(X[[*rows]] * (1 + n), losses).square().sum() for n in range(calls))
        return out + read(losses)

    return loop


def appends(model: Any, h: Tensor, out: Tensor, losses: Any) -> None:
    losses.append(h.square().sum())
    losses.append(out.abs().sum(1))


def writes(model: Any, h: Tensor, out: Tensor, losses: Any) -> None:
    losses["h"] = losses.get("h", 0) + h.square().sum(1)


def to_nested(model: Any, h: Tensor, out: Tensor, losses: Any) -> None:
    model.nested["losses"]["first"] = h.square().sum(1)


def nested_loss(model: Any, rows: Sequence[int]) -> Tensor:
    out = model(X[[*rows]])
    return out.square().sum() + model.nested["losses"]["first"].sum()


def of_all(losses: Any) -> Tensor:
    return sum(x.sum() for x in losses)


GIVEN: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    "list": (lambda: Layers(appends), losses_in(list, of_all)),
    "nested dict of the model": (lambda: Layers(to_nested), nested_loss),
    "list of two calls": (lambda: Layers(appends), losses_in(list, of_all, 2)),
    "list that holds some": (
        lambda: Layers(appends),
        losses_in(lambda: [torch.zeros((), dtype=torch.float64)], of_all),
    ),
    "dict": (lambda: Layers(writes), losses_in(dict, lambda found: found["h"].sum())),
    "dict that holds one": (
        lambda: Layers(writes),
        losses_in(
            lambda: {"h": torch.zeros((), dtype=torch.float64)}, lambda found: found["h"].sum()
        ),
    ),
}


@pytest.mark.parametrize("name", [*NESTED, *GIVEN])
def test_samples_are_clipped_by_their_own_gradients(name: str) -> None:
    make, loop = (NESTED | GIVEN)[name]
    norms = check_clipped(seeded(make), loop, bound=0.4, steps=2)
    assert norms.min() > 0 and norms.max() > 0.4


def test_rows_of_a_unit_and_padding() -> None:
    fresh = seeded(Reversible)
    norms, sums = one_at_a_time(fresh, squares, [[1], [0, 3], [4]])
    wrapped = wrap(fresh(), unit=Documents("who"))
    wrapped(X, who=torch.tensor([1, 0, -1, 1, 2])).square().sum().backward()
    assert_clipped(wrapped, norms, sums, 1e-9)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ZeroDivisionError


def test_a_backward_that_fails_leaves_the_model_as_it_is() -> None:
    class Failing(Layers):
        def forward(self, x: Tensor, losses: Any = None) -> Any:
            self.seen = x.detach()
            return Fails.apply(super().forward(x))

    model = Failing().double()
    wrapped = wrap(model)
    loss = squares(wrapped, range(B))
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert torch.equal(model.seen, X[-1:])


def test_a_forward_that_fails_leaves_the_model_as_it_is() -> None:
    def fails(model: Any, *_: Any) -> None:
        if len(seen) == 2:
            raise ZeroDivisionError
        seen.append(0)

    seen: list[int] = []
    model = Layers(fails).double()
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ZeroDivisionError):
        wrap(model)(X)
    assert {name: id(p) for name, p in model.named_parameters()} == before


class RunsLate(torch.autograd.Function):
    """Of inputs: its backward comes after the gradients of samples, and adds to one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ELSEWHERE["found"].backward(torch.ones(1, dtype=torch.float64))
        return grad


def test_a_gradient_that_comes_after_its_sample_was_clipped_is_refused() -> None:
    wrapped = wrap(Layers(to_global).double())
    loss = wrapped(RunsLate.apply(X.clone().requires_grad_())).square().sum()
    with raises("FC186"):
        loss.backward(retain_graph=True)


ELSEWHERE: dict[str, Any] = {}


def to_global(model: Any, h: Tensor, out: Tensor, losses: Any) -> None:
    ELSEWHERE["found"] = h.square().sum(1)


def to_global_output(model: Any, h: Tensor, out: Tensor, losses: Any) -> None:
    ELSEWHERE["found"] = out


def to_class(model: Any, h: Tensor, out: Tensor, losses: Any) -> None:
    Elsewhere.found = h.square().sum(1)


def to_weights(model: Any, h: Tensor, out: Tensor, losses: Any) -> None:
    ELSEWHERE["found"] = model.head.weight.square().sum()


def unevenly(model: Any, h: Tensor, out: Tensor, losses: Any) -> None:
    losses = [h.square().sum(1)]
    if torch.equal(out, ELSEWHERE.setdefault("last", out)):
        model.penalty = losses[0]
    ELSEWHERE["found"] = losses[0]


@pytest.mark.parametrize("leave", [to_global, to_global_output, to_class, to_weights, unevenly])
@pytest.mark.parametrize("alone", [False, True])
def test_a_loss_that_reads_what_forward_left_elsewhere_is_refused(leave: Any, alone: bool) -> None:
    wrapped = wrap(Layers(leave).double())
    out = wrapped(X)
    found = Elsewhere.found if leave is to_class else ELSEWHERE.get("found")
    loss = found.square().sum() + (0 if alone else out.square().sum())
    with raises("FC185"):
        loss.backward()
    assert all(p.grad is None for p in wrapped.parameters())
    # What is there and not read does no harm.
    check_clipped(seeded(lambda: Layers(leave)), squares)


def several(m: Any, texts: list[Tensor]) -> list[Tensor]:
    """Lists of tensors of several lengths, one of which it leaves in a global."""
    found = [m.net(text) for text in texts]
    ELSEWHERE["found"] = found[-1]
    return found


def test_entries_of_a_list_are_outputs() -> None:
    texts = [X[b, : b + 1, None].clone() for b in range(B)]
    wrapped = wrap(Holder(several, net=mlp(1, 2)).double())
    found = wrapped(texts)
    found[0].mul_(2)  # in place, as a loop may
    sum(x.square().sum() for x in found).backward()
    assert wrapped.get_norm_sample().shape == (B,)
    wrapped.zero_grad(set_to_none=True)
    loss = sum(x.square().sum() for x in wrapped(texts)) + ELSEWHERE["found"].sum()
    with raises("FC185"):
        loss.backward()


def test_memory_of_runs_goes_with_the_graph() -> None:
    """A run whose attributes hold its graph is freed with the output, without a backward."""

    class Keeps(Reversible):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.out = out
            return out

    model = Keeps().double()
    out = wrap(model)(X)
    held = weakref.ref(out.grad_fn.next_functions[-1][0])
    assert held() is not None
    gc.disable()
    try:
        del out, model.out
        assert held() is None
    finally:
        gc.enable()


def test_copies_run_layers_again() -> None:
    check_clipped(seeded(AdjointODE), squares, of=copy.deepcopy)
