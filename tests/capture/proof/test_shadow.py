"""The oracle and the probe say what today's proofs say."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.engine.model_watch import ModelWatch
from tests.capture.proof.mixers import RIGHT, WRONG, Around, B, K, T
from tests.support.models import CASES
from tests.support.plans import Plan, RandomModel, batch_of, plans
from tests.support.profiles import profile
from tests.support.shadow import Shadow, shadowed

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def shadow() -> Iterator[Shadow]:
    with shadowed() as found:
        yield found


def test_it_is_off() -> None:
    assert ModelWatch.shadow is None


@pytest.mark.parametrize("name", CASES)
def test_models_with_every_rule(name: str, shadow: Shadow) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    GradSampleModuleFlashClipping(case.make())(*case.batch())
    assert shadow.proofs == 1 and not shadow.disagreements and not shadow.undecided


@pytest.mark.parametrize("layout", ["ids", "sequence", "image"])
def test_random_architectures(layout: str) -> None:
    @profile(6)
    @given(plan=plans(layout))
    def check(plan: Plan) -> None:
        model = RandomModel(plan).double()
        with shadowed() as shadow:
            flash = GradSampleModuleFlashClipping(model, batch_first=not plan.time_first)
            flash(*batch_of(plan))
        assert not shadow.disagreements

    check()


#: Wrong models that today's proof passes: it does not look at what the batch's other gradients or
#: an extreme sample do, nor at draws.
PASSED_TODAY = {
    "a coin, python",
    "eight bits",
    "function, norm",
    "function, twice",
    "hook, activations",
    "hook, largest",
    "hook, mean",
    "hook, norm",
    "hook, size",
    "mixup, detached",
    "outlier guard",
    "quantized",
    "scaled by the largest",
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_models(name: str, shadow: Shadow) -> None:
    torch.manual_seed(0)
    GradSampleModuleFlashClipping(Around(RIGHT[name]))(torch.randn(B, T, K))
    assert shadow.proofs and not shadow.disagreements


@pytest.mark.parametrize("name", sorted(PASSED_TODAY))
def test_wrong_models_that_the_oracle_alone_refuses(name: str, shadow: Shadow) -> None:
    torch.manual_seed(0)
    random.seed(0)
    flash = GradSampleModuleFlashClipping(Around(WRONG[name]), strict=False)
    flash(torch.randn(B, T, K)).square().sum().backward()
    assert "the oracle alone refuses" in shadow.disagreements[0]
