"""Every model of the registry: exact in every way that it may be run, or refused with a code."""

from __future__ import annotations

import warnings
import zlib

import pytest

from tests.support.errors import warns
from tests.support.recorded import recorded_factors
from tests.zoo import (
    attention,
    constants,
    declared,
    experts,
    folded,
    layers,
    outputs,
    rows,
    rules,
    shared,
    spelled,
    uses,
)
from tests.zoo.case import WAYS, ModelCase, check_refused, one_by_one

CASES: dict[str, ModelCase] = {
    f"{module.__name__.rpartition('.')[2]}: {name}": case
    for module in (
        uses,
        layers,
        shared,
        rows,
        constants,
        declared,
        spelled,
        folded,
        outputs,
        rules,
        attention,
        experts,
    )
    for name, case in module.CASES.items()
}
EXACT = {name: case for name, case in CASES.items() if not case.refused}
REFUSED = {name: case for name, case in CASES.items() if case.refused}


#: Where dropout would fall otherwise than in the one forward that is the truth.
OF_CHANCE = ("units", "one_by_one", "padded", "repeated", "resized")


def runs() -> list[object]:
    """Each model in one pass, two of three in another way; in all of them before a release."""
    found: list[object] = []
    for name, case in EXACT.items():
        without = (*case.without, *(OF_CHANCE if case.draws else ()))
        number = zlib.crc32(name.encode())
        others = [way for way in WAYS if way not in (*without, "one_pass", "compiled")]
        chosen = ("two_pass", others[number % len(others)], "")[number % 3]
        for way in WAYS:
            if way not in without:
                marks = [] if way in ("one_pass", chosen, *case.always) else [pytest.mark.slow]
                if way != "one_pass":  # in which the comparison before a first step takes part
                    marks.append(pytest.mark.without_gate)
                found.append(pytest.param(name, way, marks=marks, id=f"{name}-{way}"))
    return found


@pytest.mark.parametrize(("name", "way"), runs())
def test_model_in_a_way_that_applies_is_exact(name: str, way: str) -> None:
    case = EXACT[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        WAYS[way](case)


@pytest.mark.without_gate
@pytest.mark.parametrize("name", [name for name, case in EXACT.items() if case.factors])
def test_model_with_a_layer_of_its_own_keeps_the_factors_of_the_parent(name: str) -> None:
    case = EXACT[name]
    model, batch = case.make()
    kind = type(model.get_submodule("layer")).__name__
    flash = case.wrap(model)
    found = recorded_factors(flash, lambda: case.losses(flash, batch).mean().backward())
    assert found[kind] == case.factors


def refusals() -> list[object]:
    """Each model in one pass, one of three in two passes; in both before a release."""
    found: list[object] = []
    for name, case in REFUSED.items():
        seldom = zlib.crc32(name.encode()) % 3
        for mode in ("one_pass", "two_pass"):
            marks = [] if case.gate else [pytest.mark.without_gate]
            marks += [pytest.mark.slow] if mode == "two_pass" and seldom else []
            found.append(pytest.param(name, mode, marks=marks, id=f"{name}-{mode}"))
    return found


@pytest.mark.parametrize(("name", "mode"), refusals())
def test_model_that_is_not_supported_is_refused(name: str, mode: str) -> None:
    check_refused(REFUSED[name], mode)


@pytest.mark.parametrize("name", [name for name, case in REFUSED.items() if case.alone])
def test_model_that_is_refused_for_its_rows_is_exact_one_by_one(name: str) -> None:
    with warns("FC180"):
        one_by_one(REFUSED[name])
