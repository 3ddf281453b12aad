"""``survey``: the page of all kinds of models of ``transformers``, and a few of its rows."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.survey import END, PAGE, START
from benchmarks.survey.kinds import all_kinds
from benchmarks.survey.measure import WRONG
from tests.benchmarks.conftest import Run


def test_the_page_has_every_kind() -> None:
    generated = PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0]
    rows = [line.split("|") for line in generated.splitlines() if line.startswith("| ")]
    names = [row[1].strip(" `") for row in rows if row[1].strip() not in ("kind", "---")]
    assert names == [name for kinds in all_kinds().values() for name in kinds]
    assert WRONG not in generated


def test_rows_are_measured(run: Run) -> None:
    names = ["OPTForCausalLM", "MambaForCausalLM"]
    status, printed = run("survey", "--only", *names, "--limit", "300")
    assert status == 0, printed
    assert all(f"{name}: exact" in printed for name in names)
    assert run("survey", "--only", "Nothing")[0] == 2
