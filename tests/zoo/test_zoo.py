"""Every model of the registry: exact in every way that it may be run, or refused with a code."""

from __future__ import annotations

import warnings
import zlib

import pytest

from tests.support.errors import warns
from tests.zoo import layers, rows, shared, uses
from tests.zoo.case import ALWAYS, WAYS, ModelCase, check_refused, one_by_one

CASES: dict[str, ModelCase] = {
    f"{module.__name__.rpartition('.')[2]}: {name}": case
    for module in (uses, layers, shared, rows)
    for name, case in module.CASES.items()
}
EXACT = {name: case for name, case in CASES.items() if not case.refused}
REFUSED = {name: case for name, case in CASES.items() if case.refused}


def runs() -> list[object]:
    """Each model in one pass, in two, and in one other way; in all others before a release."""
    found: list[object] = []
    for name, case in EXACT.items():
        others = [way for way in WAYS if way not in (*ALWAYS, *case.without, "compiled")]
        chosen = others[zlib.crc32(name.encode()) % len(others)] if others else ""
        for way in WAYS:
            if way not in case.without:
                marks = [] if way in (*ALWAYS, chosen) else [pytest.mark.slow]
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


@pytest.mark.parametrize("name", [name for name, case in EXACT.items() if case.warned])
def test_model_that_runs_by_sample_warns_once(name: str) -> None:
    case = EXACT[name]
    model, batch = case.make()
    flash = case.wrap(model)
    with warns(case.warned):
        case.losses(flash, batch).mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.losses(flash, batch).mean().backward()


def refusals() -> list[object]:
    marks = {True: [], False: [pytest.mark.without_gate]}
    return [pytest.param(name, marks=marks[case.gate], id=name) for name, case in REFUSED.items()]


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", refusals())
def test_model_that_is_not_supported_is_refused(name: str, mode: str) -> None:
    check_refused(REFUSED[name], mode)


@pytest.mark.parametrize("name", [name for name, case in REFUSED.items() if case.alone])
def test_model_that_is_refused_for_its_rows_is_exact_one_by_one(name: str) -> None:
    with warns("FC180"):
        one_by_one(REFUSED[name])
