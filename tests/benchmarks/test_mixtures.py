"""``mixtures``: the page of all families of ``transformers``, and one of its rows."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.mixtures import END, PAGE, START, TRAINED
from tests.benchmarks.conftest import Run
from tests.support.mixtures import FAMILIES


def test_the_page_has_every_family() -> None:
    generated = PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0]
    tables = [part.strip().splitlines() for part in generated.split("\n\n") if "| --- |" in part]
    assert len(tables) == 2
    for lines in tables:
        assert [line.split("|")[1].strip() for line in lines[2:]] == [*FAMILIES]
    assert all(trained in tables[0][0] for trained in TRAINED)


def test_a_row_is_measured(run: Run) -> None:
    pytest.importorskip("peft")
    status, printed = run("mixtures", "--families", "Olmoe")
    assert status == 0, printed
    assert "experts alone" in printed
    assert run("mixtures", "--families", "Nothing")[0] == 2
    assert run("mixtures", "--families", "Olmoe", "--write")[0] == 2
