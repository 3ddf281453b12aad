"""Random models of every supported layer against ``torch.func``, in float64.

Deterministic as it stands; with ``FLASH_CLIPPING_PROFILE=long`` in the environment it draws anew,
forty times as many.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor, nn

from flash_clipping import (
    Documents,
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
)
from tests.support.oracle import Truth, per_sample_truth
from tests.support.plans import Plan, RandomModel, batch_of, losses, plans
from tests.support.profiles import PROFILE, profile
from tests.support.sums import norm_of
from tests.support.units import index_for

pytestmark = pytest.mark.without_gate

TOLERANCE = 1e-9

#: Floor below it, as a part of the whole gradient's square and as it is: a gradient that is zero
#: in exact arithmetic (a bias before a normalization) is the difference of terms that are not.
FLOOR = 1e-13
ZERO = 1e-20

#: Layout of the input -> examples in CI.
EXAMPLES = {
    "ids": 24,
    "vector": 12,
    "sequence": 36,
    "grid": 12,
    "signal": 15,
    "image": 21,
    "volume": 12,
}


def truth_of(model: nn.Module, plan: Plan) -> Truth:
    plain = copy.deepcopy(model)
    plain.checkpointing = "none"
    return per_sample_truth(plain, batch_of(plan), lambda m, b: losses(m, b, plan), dtype=None)


def check_squares(found: Tensor, expected: Tensor, total: Tensor, what: str) -> None:
    """Norms of every sample: relative error, with :data:`FLOOR` below it."""
    assert found.shape == expected.shape, what
    assert torch.isfinite(found).all(), f"{what}: {found}"
    error = (found.square() - expected.square()).abs()
    allowed = 2 * TOLERANCE * expected.square() + FLOOR * total.square() + ZERO
    assert (error <= allowed).all(), f"{what}: found {found}, expected {expected}"


def check_plan(plan: Plan, units: bool = False) -> None:
    model = RandomModel(plan).double()
    # Ties can leave nothing that is read trainable: then there is no gradient, private or not.
    assume(losses(copy.deepcopy(model), batch_of(plan), plan).requires_grad)
    truth = truth_of(model, plan)
    if units:
        index = index_for(plan.batch_size)
        truth = truth.of_units(index)
    bound = max(truth.norms.median().item(), 1e-3)  # clips some samples and not others
    wrap = GradSampleModuleFlashClipping if plan.wrap else GradSampleHooksFlashClipping
    flash = wrap(
        model,
        max_grad_norm=bound,
        loss_reduction=plan.reduction,
        mode=plan.mode,
        batch_first=not plan.time_first,
        unit=Documents("user") if units else None,
    )
    called = flash if plan.wrap else model
    if units:
        called = functools.partial(called, user=index)
    loss = losses(called, batch_of(plan), plan)
    (loss.mean() if plan.reduction == "mean" else loss.sum()).backward()

    check_squares(flash.get_norm_sample(), truth.norms, truth.norms, "norms")
    coef = flash.get_clipping_coef()
    assert (coef <= 1).all() and (coef * truth.norms <= bound * (1 + TOLERANCE)).all()
    clipped = truth.clipped(bound)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            assert param.grad is None, name
            continue
        check_squares(norm_of(flash, param), truth.param_norms[name], truth.norms, name)
        assert param.grad is not None and param.grad.shape == param.shape, name
        error = (param.grad - clipped[name]).abs().max()
        allowed = TOLERANCE * (clipped[name].abs().max() + 1e-3 * max(bound, 0.1))
        assert error <= allowed, f"{name}: clipped sum off by {error:.2e}, {allowed:.2e} allowed"
    flash.remove_hooks()


@pytest.mark.timeout(300 if PROFILE == "default" else 7200)
@pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:There is a performance drop")
@pytest.mark.parametrize("layout", EXAMPLES)
def test_random_architecture(layout: str) -> None:
    """Norms, norms of each parameter and clipped sums of any model are those of ``torch.func``."""

    @profile(EXAMPLES[layout])
    @given(plan=plans(layout))
    def holds(plan: Plan) -> None:
        check_plan(plan)

    holds()


@pytest.mark.timeout(300 if PROFILE == "default" else 7200)
@pytest.mark.parametrize("layout", ["ids", "sequence"])
def test_random_architecture_time_first(layout: str) -> None:
    """The same with ``batch_first=False``: every layer sees ``[T, B, ...]``."""

    @profile(12)
    @given(plan=plans(layout, time_first=True))
    def holds(plan: Plan) -> None:
        check_plan(plan)

    holds()


@pytest.mark.parametrize("layout", ["sequence", "image"])
def test_random_architecture_of_units(layout: str) -> None:
    """The same for units of several rows."""

    @profile(6)
    @given(plan=plans(layout))
    def holds(plan: Plan) -> None:
        check_plan(plan, units=True)

    holds()


# -- found by the above, or beyond what it can draw -----------------------------------------------
