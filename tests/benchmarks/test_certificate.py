"""``certificate``: a short search runs, writes its tables, and can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import certificate
from tests.benchmarks.conftest import Run
from tests.certificate import search

#: Exact norms, and no rounding that could be seen: holds whatever the search draws.
QUICK = ("certificate", "--device", "cpu", "--rules", "RMSNorm", "--tries", "3")
FP64 = (*QUICK, "--backends", "torch", "--precisions", "fp64")


@pytest.mark.slow
def test_the_worst_of_every_row_is_written(run: Run, tmp_path: Path) -> None:
    record = tmp_path / "certificate.json"
    status, printed = run(*FP64, "--json", record)
    assert status == 0, printed
    content = json.loads(record.read_text())
    (row,) = content["search"]
    assert (row["rule"], row["tries"], row["broken"]) == ("RMSNorm", 6, 0)
    assert 0 < row["own"] <= 1 + 1e-9 and "Attack(" in row["worst"]
    assert printed.count("| RMSNorm |") == 1


def test_a_broken_bound_is_an_exit_status(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    released = search.released
    monkeypatch.setattr(search, "released", lambda model: released(model) * 1.001)
    monkeypatch.setattr(certificate, "EQUAL_SAMPLES", (64,))
    status, printed = run(*FP64)
    assert status == 1, printed


@pytest.mark.parametrize("options", [("--rules", "Nothing"), ("--precisions", "fp8")])
def test_unknown_names_are_refused(run: Run, options: tuple[str, str]) -> None:
    status, printed = run("certificate", "--device", "cpu", *options)
    assert status == 2 and options[1] in printed
