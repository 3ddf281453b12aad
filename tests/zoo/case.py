"""A model, a batch, and what the library makes of them: exact, or refused with a code.

What is exact is compared in every way that a user may run it (``WAYS``) with one sample at a time
in float64. A case names the ways that do not apply to it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import Documents, FlashClippingError
from tests.support.autograd import TOLERANCE, check_truth, truth_of_one_forward
from tests.support.errors import Kinds, raises
from tests.support.models import squared_loss
from tests.support.oracle import Truth, assert_close
from tests.support.units import index_for
from tests.support.uses import Holder, make_around, seeded_batch
from tests.support.wrapping import WRAPPERS

Batch = tuple[Any, ...]


def pick(batch: Batch, places: Sequence[int]) -> Batch:
    """These samples of a batch, whose tensors and lists have a row or an entry for each."""
    return tuple(
        x[list(places)] if isinstance(x, Tensor) else type(x)(x[b] for b in places) for x in batch
    )


@dataclasses.dataclass(frozen=True)
class ModelCase:
    """One entry of the registry.

    Args:
        build: the model; drawn after seed 0, computed in float64.
        batch: drawn after seed 1; all its tensors have a row for each sample.
        losses: (model, batch) -> loss of each sample ``[B]``.
        pick: (batch, places) -> these samples of it.
        refused: the code, or codes ("FC201|FC202"), of the error in place of a step.
        match: what the error says, as a regular expression.
        gate: the comparison before a first step refuses it; others are refused without that.
        alone: what is refused is exact where samples run one at a time.
        kind: the class of the error.
        without: ways that do not apply.
        lengths: to which the second axis of a batch may be cut.
        factors: names of the factors that its ``layer`` keeps.
        always: ways that are tried in every run of the tests.
        draws: it draws dropout: the truth is of one forward with the same draws.
        options: of the wrapper.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch] = seeded_batch
    losses: Callable[[Any, Batch], Tensor] = squared_loss
    pick: Callable[[Batch, Sequence[int]], Batch] = pick
    refused: str = ""
    match: str = ""
    gate: bool = False
    alone: bool = False
    kind: Kinds = FlashClippingError
    without: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    draws: bool = False
    lengths: tuple[int, ...] = ()
    factors: frozenset[str] | set[str] = frozenset()
    tolerance: float = TOLERANCE
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make(self, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Batch]:
        torch.manual_seed(0)
        model = self.build().to(dtype)
        torch.manual_seed(1)
        batch = tuple(
            x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in self.batch()
        )
        return model, batch

    def wrap(self, model: nn.Module, wrapper: str = "wrapped", **options: Any) -> Any:
        return WRAPPERS[wrapper](model, **{**self.options, **options})

    def truth(self, model: nn.Module, batch: Batch, weights: Tensor | None = None) -> Truth:
        """Each sample alone through an ordinary backward."""
        if self.draws:
            torch.manual_seed(7)
            return truth_of_one_forward(self.losses(model, batch), model)
        params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        rows: list[list[Tensor]] = []
        for b in range(len(batch[0])):
            loss = self.losses(model, self.pick(batch, [b])).sum()
            if weights is not None:
                loss = loss * weights[b]
            model.zero_grad(set_to_none=True)
            loss.backward()
            rows.append(
                [torch.zeros_like(p) if p.grad is None else p.grad for p in params.values()]
            )
        model.zero_grad(set_to_none=True)
        grads_B = {n: torch.stack([row[i] for row in rows]).double() for i, n in enumerate(params)}
        norms = {
            n: g.reshape(len(g), math.prod(g.shape[1:])).norm(dim=1) for n, g in grads_B.items()
        }
        return Truth(torch.stack([*norms.values()]).norm(dim=0), norms, grads_B)


def around(
    use: Callable[..., Tensor], held: Callable[[], dict[str, Any]] = dict, **more: Any
) -> ModelCase:
    """A use of what a module holds, between two linear layers; ``[4, 5, 3]`` goes in."""
    return ModelCase(lambda: make_around(lambda: Holder(use, **held())), **more)


# -- the ways -------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False)


def bound_of(truth: Truth) -> float:
    """It clips some samples, and not others."""
    return truth.norms[truth.norms > 0].median().item()


def _attributes(model: nn.Module) -> dict[str, set[str]]:
    return {name: {*vars(m)} - {"_compiled_call_impl"} for name, m in model.named_modules()}


def _step(case: ModelCase, called: Any, batch: Batch, weights: Tensor | None = None) -> None:
    torch.manual_seed(7)
    losses = case.losses(called, batch)
    (losses if weights is None else losses * weights).mean().backward()


def _check(
    case: ModelCase,
    *,
    mode: str = "one_pass",
    wrapper: str = "wrapped",
    outer: Callable[[nn.Module], nn.Module] = lambda model: model,
    batch: Batch | None = None,
    weights: Tensor | None = None,
    prepare: Callable[[Any], None] = lambda flash: None,
    steps: int = 2,
    **options: Any,
) -> None:
    model, given = case.make()
    batch = given if batch is None else batch
    plain = copy.deepcopy(model)
    truth = case.truth(plain, batch, weights)
    bound = bound_of(truth)
    wrapped = outer(model)
    flash = case.wrap(wrapped, wrapper, max_grad_norm=bound, mode=mode, **options)
    prepare(flash)
    for step in range(max(steps, 1 + case.draws)):
        model.zero_grad(set_to_none=True)
        calls = getattr(model, "calls", 0)
        _step(case, flash if wrapper == "wrapped" else wrapped, batch, weights)
        if step and not (outer is Checkpointed or mode == "one_by_one"):
            assert getattr(model, "calls", 1) - calls == 1, "its forward runs once in a step"
        if not case.draws or step:
            check_truth(flash, model, truth, bound, case.tolerance)
    flash.remove_hooks()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert _attributes(model) == _attributes(plain)


def one_pass(case: ModelCase) -> None:
    _check(case)


def two_pass(case: ModelCase) -> None:
    _check(case, mode="two_pass", wrapper="hooks")


def one_by_one(case: ModelCase) -> None:
    _check(case, mode="one_by_one", steps=1)


def checkpointed(case: ModelCase) -> None:
    _check(case, outer=Checkpointed)


def functorch(case: ModelCase) -> None:
    """Each function by its own backward, without the rules of layers."""
    _check(case, force_functorch=True, steps=1)


def compiled(case: ModelCase) -> None:
    torch._dynamo.reset()
    _check(case, prepare=lambda flash: flash.compile(backend="eager"))
    torch._dynamo.reset()


def repeated(case: ModelCase) -> None:
    """Two samples are alike."""
    batch = case.make()[1]
    places = [*range(len(batch[0]))]
    _check(case, batch=case.pick(batch, [0, *places[:-1]]), steps=1)


def resized(case: ModelCase) -> None:
    """Batches of other sizes, after the first has shown how the model runs."""
    model, batch = case.make()
    places = [*range(len(batch[0]))]
    plain, flash = copy.deepcopy(model), case.wrap(model, max_grad_norm=1.0)
    sizes = (places, [0], places[1:] or [0], [*places, 0], places[:2], places)
    for chosen, length in zip(sizes, (None, *case.lengths, *[None] * len(sizes)), strict=False):
        part = case.pick(batch, chosen)
        if length is not None:
            part = tuple(x[:, :length] for x in part)
        truth = case.truth(plain, part)
        model.zero_grad(set_to_none=True)
        _step(case, flash, part)
        check_truth(flash, model, truth, 1.0, case.tolerance)


def padded(case: ModelCase) -> None:
    """Rows that are nobody's on either side, of which no loss is taken."""
    batch = case.make()[1]
    places = [*range(len(batch[0]))]
    weights = torch.ones(len(places) + 2)
    weights[[0, -1]] = 0
    _check(case, batch=case.pick(batch, [places[-1], *places, 0]), weights=weights, steps=1)


def units(case: ModelCase) -> None:
    """Rows of two units, and one of none."""
    model, batch = case.make()
    index = index_for(len(batch[0]))
    count = int(index.max()) + 1

    grads: list[Truth] = [case.truth(model, case.pick(batch, [b])) for b in range(len(batch[0]))]
    of_rows = {n: torch.cat([truth.grads[n] for truth in grads]) for n in grads[0].grads}
    of_units = {
        n: torch.stack([g[index == unit].sum(0) for unit in range(count)])
        for n, g in of_rows.items()
    }
    norms = {n: g.reshape(len(g), math.prod(g.shape[1:])).norm(dim=1) for n, g in of_units.items()}
    truth = Truth(torch.stack([*norms.values()]).norm(dim=0), norms, of_units)
    bound = bound_of(truth)
    flash = case.wrap(model, max_grad_norm=bound, unit=Documents("unit"))
    case.losses(lambda *args: flash(*args, unit=index), batch).mean().backward()
    check_truth(flash, model, truth, bound, case.tolerance)


def empty(case: ModelCase) -> None:
    """A draw without samples between two steps, whose row is not finite."""
    model, batch = case.make()
    truth = case.truth(copy.deepcopy(model), batch)
    bound = bound_of(truth)
    flash = case.wrap(model, max_grad_norm=bound)
    for samples in (None, 0, None):
        model.zero_grad(set_to_none=True)
        flash.expect_samples(samples)
        if samples is None:
            _step(case, flash, batch)
            check_truth(flash, model, truth, bound, case.tolerance)
            continue
        row = [
            torch.full_like(x, math.nan) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in case.pick(batch, [0])
        ]
        case.losses(flash, tuple(row)).sum().backward()
        assert flash.get_norm_sample().shape == (0,)
        trained = [p for p in model.parameters() if p.requires_grad]
        assert all(p.grad is not None and not p.grad.any() for p in trained)


def not_finite(case: ModelCase) -> None:
    """A sample whose gradient is not finite adds nothing; the others are as they are without it."""
    model, batch = case.make()
    truth, others = case.truth(copy.deepcopy(model), batch), torch.arange(len(batch[0])) != 1
    rest = Truth(
        truth.norms[others],
        {name: norms[others] for name, norms in truth.param_norms.items()},
        {name: grads[others] for name, grads in truth.grads.items()},
    )
    bound = bound_of(rest)
    flash = case.wrap(model, max_grad_norm=bound)
    _step(case, flash, batch)  # shows who is a sample
    for value in (math.nan, math.inf):
        model.zero_grad(set_to_none=True)
        _step(case, flash, batch, torch.where(others, 1.0, value))
        assert not flash.get_clipping_coef()[~others].any()
        assert_close(flash.get_norm_sample()[others], rest.norms, case.tolerance, "norms")
        for name, grad in rest.clipped(bound).items():
            slack = 1e-5 * truth.norms.max() / truth.param_norms[name].max().clamp(min=1e-30)
            tolerance = 10 * case.tolerance * max(1.0, float(slack))
            assert_close(model.get_parameter(name).grad, grad, tolerance, name)


def autocast(case: ModelCase) -> None:
    """In 16 bits where autocast says so: norms of single samples as far as rounding goes."""
    model, batch = case.make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        truth = case.truth(copy.deepcopy(model), batch)
        flash = case.wrap(model, max_grad_norm=1.0)
        _step(case, flash, batch)
    assert_close(flash.get_norm_sample(), truth.norms, 0.05, "norms")


WAYS: dict[str, Callable[[ModelCase], None]] = {
    way.__name__: way
    for way in (
        one_pass,
        two_pass,
        one_by_one,
        checkpointed,
        functorch,
        compiled,
        repeated,
        resized,
        padded,
        units,
        empty,
        not_finite,
        autocast,
    )
}


def check_refused(case: ModelCase, mode: str) -> None:
    """No step is made: parameters have no gradients, and are as they were."""
    model, batch = case.make()
    before = [param.detach().clone() for param in model.parameters()]
    flash = None
    for _ in range(1 + (mode == "one_pass")):
        with raises(case.refused, case.kind, match=case.match or None):
            flash = flash or case.wrap(model, mode=mode)
            case.losses(flash, batch).mean().backward()
    assert all(param.grad is None for param in model.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
