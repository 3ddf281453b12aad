"""The oracle and the probe say what today's proofs say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given

from flash_clipping import FlashClippingError, GradSampleModuleFlashClipping
from flash_clipping.integration.model_watch import ModelWatch
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


#: Right models that today's proof refuses: a value that Python reads, or that decides which rows a
#: layer gets, is taken for a reason to doubt rows that are not the samples.
REFUSED_TODAY: set[str] = set()

#: Wrong models that today's proof passes.
PASSED_TODAY: set[str] = set()


@pytest.mark.parametrize("name", RIGHT)
def test_right_models(name: str, shadow: Shadow) -> None:
    torch.manual_seed(0)
    try:
        GradSampleModuleFlashClipping(Around(RIGHT[name]))(torch.randn(B, T, K))
    except FlashClippingError:
        assert name in REFUSED_TODAY
    assert not shadow.disagreements


def test_wrong_models_that_today_s_proof_passes() -> None:
    found = set()
    for name, inner in WRONG.items():
        torch.manual_seed(0)
        with shadowed() as shadow:
            flash = GradSampleModuleFlashClipping(Around(inner), strict=False)
            try:
                flash(torch.randn(B, T, K)).square().sum().backward()
            except FlashClippingError:
                continue
        if shadow.disagreements:
            found.add(name)
    assert found == PASSED_TODAY
