"""Reports: what they say, ε by every accountant, and several of them together."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.accountants import PRVAccountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import (
    FixedOrder,
    FlashPrivacyEngine,
    NotPoissonWarning,
    PoissonSampling,
    RandomAllocation,
    SeededNoiseWarning,
    Shuffled,
    Users,
)
from flash_clipping.__main__ import main
from flash_clipping.engine.accounting import ADD_OR_REMOVE, ZERO_OUT
from flash_clipping.noise.mechanisms import BandedInverseNoise
from flash_clipping.noise.releases import LOSS_GRID, Release, grid_step
from flash_clipping.noise.report import compose, statistics_report
from tests.support.errors import raises, warns

pytest.importorskip("dp_accounting")
SIZE, BATCHES, DELTA = 30, 5, 1e-3


def trained(accountant: str = "pld", *, seed: int | None = None, **options: Any) -> Any:
    engine = FlashPrivacyEngine(accountant=accountant, seed=seed)
    model = nn.Linear(4, 3)
    data = TensorDataset(torch.randn(SIZE, 4), torch.arange(SIZE) % 3)
    module, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=SIZE // BATCHES),
        **{"noise_multiplier": 1.5, "max_grad_norm": 1.0} | options,
    )
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
    return engine, optimizer


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp", "pld"])
def test_every_accountant_says_the_same_of_poisson_batches(accountant: str) -> None:
    engine, optimizer = trained(accountant)
    assert len(engine.accountant) == 10
    report = json.loads(json.dumps(engine.report(DELTA)))
    found = report["epsilon"]
    if accountant != "gdp":  # a limit for many steps, and no bound: reports have none
        assert found[accountant]["epsilon"] == pytest.approx(engine.get_epsilon(DELTA), rel=1e-6)
    assert {name: e["is_bound"] for name, e in found.items()} == dict.fromkeys(
        ("pld", "prv", "rdp"), True
    )
    assert found["prv"]["epsilon"] == pytest.approx(found["pld"]["epsilon"], abs=0.02)
    assert found["rdp"]["epsilon"] > found["pld"]["epsilon"]
    assert report["relation"] == ADD_OR_REMOVE and report["unit"] == "a sample of the dataset"
    assert report["violated"] == report["seeds"] == []
    (part,) = report["parts"]
    assert part["accountant"] == accountant and part["samples"] == SIZE and part["steps"] == 10
    assert part["history"] == [{"noise_multiplier": 1.5, "sample_rate": 0.2, "steps": 10}]
    assert part["process"]["mechanism"] == "PoissonSampling"
    assert part["process"]["noise"] == "IndependentNoise()"
    assert any("draws every sample independently" in text for text in report["assumptions"])
    assert report["versions"]["opacus"] and report["versions"]["python"]


@pytest.mark.parametrize(
    ("options", "known", "relation"),
    [
        ({"mechanism": RandomAllocation()}, {"pld"}, ADD_OR_REMOVE),
        ({"mechanism": Shuffled()}, {"pld", "rdp"}, ZERO_OUT),
        (
            {"mechanism": FixedOrder(BandedInverseNoise(2))},
            {"pld", "rdp"},
            ZERO_OUT,
        ),
        ({"mechanism": PoissonSampling(max_batch_size=12)}, {"pld"}, ADD_OR_REMOVE),
    ],
)
def test_numbers_unknown_to_an_accountant_are_none(
    options: dict[str, Any], known: set[str], relation: str
) -> None:
    engine, _ = trained(**options)
    report = engine.report(DELTA)
    found = report["epsilon"]
    assert {name for name, e in found.items() if e["epsilon"] is not None} == known
    assert all("knows" in e["why"] for name, e in found.items() if name not in known)
    assert found["pld"]["epsilon"] == pytest.approx(engine.get_epsilon(DELTA), rel=1e-6)
    assert report["relation"] == relation
    if "rdp" in known:
        assert found["rdp"]["epsilon"] > found["pld"]["epsilon"]


def test_warnings_are_in_the_report() -> None:
    with warns("FC335", NotPoissonWarning):
        engine, _ = trained("prv", poisson_sampling=False)
    report = engine.report(DELTA)
    assert report["violated"] and not any(e["is_bound"] for e in report["epsilon"].values())
    with warns("FC570", SeededNoiseWarning):
        engine, optimizer = trained("prv", seed=7)
    assert engine.report(DELTA)["seeds"] == ["7"]
    composed = compose([report, engine.report(DELTA)])
    assert composed["violated"] == report["violated"] and composed["seeds"] == ["7"]


def test_reports_without_noise_or_steps_say_so() -> None:
    engine, _ = trained("rdp", noise_multiplier=0.0)
    for found in engine.report(DELTA)["epsilon"].values():
        assert found["epsilon"] is None and "infinite" in found["why"]
    empty = FlashPrivacyEngine().report(DELTA)["epsilon"]
    assert {e["epsilon"] for e in empty.values()} == {0.0}


@pytest.mark.parametrize(
    "release",
    [
        Release(1.0, 10, "poisson", 1.0),
        Release(1e-3, 10, "poisson", 0.1),
        Release(1e4, 10, "poisson", 0.01),
        Release(0.05, 3),
        Release(1e4),
        Release(1e4, 3, "one_of", size=100),
        Release(0.01, 3, "rows", 0.1, 5),
    ],
)
def test_extremes_have_a_number_or_none(release: Release) -> None:
    process = {"sensitivity": 1.0, "standard_deviation": 1.0, "delta": DELTA}
    report = statistics_report("a", **process) | {"releases": [asdict(release)]}
    for found in compose([report])["epsilon"].values():
        assert (found["epsilon"] is None and found["why"]) or 0 <= found["epsilon"] < math.inf


def test_runs_compose_as_one_history() -> None:
    """Against Opacus' accountant for both runs, and below the sum."""
    first, second = trained("prv")[0], trained("pld", noise_multiplier=2.0)[0]
    reports = [json.loads(json.dumps(engine.report(DELTA))) for engine in (first, second)]
    found = compose(reports)["epsilon"]
    theirs = PRVAccountant()
    theirs.history = [(1.5, 0.2, 10), (2.0, 0.2, 10)]
    together = theirs.get_epsilon(DELTA)
    assert found["pld"]["epsilon"] == pytest.approx(together, abs=0.02)
    assert found["prv"]["epsilon"] == pytest.approx(together, abs=0.02)
    assert together < sum(r["epsilon"]["pld"]["epsilon"] for r in reports) - 0.1
    assert [part["accountant"] for part in compose(reports)["parts"]] == ["prv", "pld"]


def test_random_allocation_composes_with_others() -> None:
    allocated = trained(mechanism=RandomAllocation())[0]
    cut = trained(mechanism=PoissonSampling(max_batch_size=12))[0]
    statistics = statistics_report(
        "means", sensitivity=0.1, standard_deviation=0.3, delta=DELTA, times=2
    )
    found = compose([allocated.report(DELTA), cut.report(DELTA), statistics])
    assert len(found["releases"]) == 3 and len(found["parts"]) == 3
    h = min(grid_step(1.5, 5), LOSS_GRID)
    others = Release(1.5, 2, "one_of", size=5).losses(h).compose(Release(3.0, 2).losses(h))
    by_hand = max(
        others.compose(
            Release(1.5, 10, "truncated", 0.2, 12, samples).losses(h)
        ).get_epsilon_for_delta(DELTA)
        for samples in (SIZE, SIZE + 1)
    )
    assert found["epsilon"]["pld"]["epsilon"] == pytest.approx(by_hand, rel=1e-6)
    assert by_hand > max(allocated.get_epsilon(DELTA), cut.get_epsilon(DELTA))


def test_statistics_are_gaussian_mechanisms() -> None:
    dp = pytest.importorskip("dp_accounting")
    parts = [
        statistics_report("a", sensitivity=2.0, standard_deviation=4.0, delta=DELTA, times=3),
        statistics_report("b", sensitivity=1.0, standard_deviation=3.0, delta=DELTA),
    ]
    exact = dp.get_epsilon_gaussian((3 / 4 + 1 / 9) ** -0.5, DELTA)
    found = compose(parts)["epsilon"]
    assert found["pld"]["epsilon"] == pytest.approx(exact, rel=1e-6)
    assert found["prv"]["epsilon"] is None and "Poisson" in found["prv"]["why"]


def test_reports_that_do_not_compose_are_refused() -> None:
    report = statistics_report("a", sensitivity=1.0, standard_deviation=3.0, delta=DELTA)
    zeroed = statistics_report(
        "b", sensitivity=1.0, standard_deviation=3.0, delta=DELTA, relation=ZERO_OUT
    )
    for reports, words in (
        ([], "found no report"),
        ([report, {}], "report 1 cannot be read"),
        ([report | {"format": 2}], "format 2 in report 0"),
        ([report | {"releases": [{}]}], "report 0 cannot be read"),
        ([report, zeroed], "different neighbours"),
        ([report, report | {"unit": "user"}], "different neighbours.*: user"),
        ([report, report | {"delta": 1e-6}], r"different deltas \[1e-06, 0.001\]"),
    ):
        with raises("FC568", ValueError, match=words):
            compose(reports)
    assert compose([report, report | {"delta": 1e-6}], delta=1e-4)["delta"] == 1e-4
    with raises("FC302", ValueError, match="delta: found 0"):
        compose([report], delta=0.0)


def test_report_names_its_units() -> None:
    engine, _ = trained("rdp", unit=Users(torch.arange(SIZE) // 2))
    assert engine.report(DELTA)["unit"] == "an owner of rows"


def test_command_composes_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = statistics_report("a", sensitivity=1.0, standard_deviation=3.0, delta=DELTA)
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        file.write_text(json.dumps(report), encoding="utf-8")
    assert main(["compose", *map(str, files), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == compose([report, report])
    assert main(["compose", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    files[0].write_text("[", encoding="utf-8")
    assert main(["compose", str(files[0])]) == 2
    assert math.isfinite(compose([report])["epsilon"]["pld"]["epsilon"])
