"""The list of mutants names lines that are there: what has gone is tried no more, unseen."""

from __future__ import annotations

from tests.mutants.__main__ import PACKAGE, ROOT, mutants


def test_every_mutant_changes_one_line() -> None:
    texts = [path.read_text() for path in ROOT.glob(f"{PACKAGE}/**/*.py")]
    places = {mutant.name: sum(text.count(mutant.old) for text in texts) for mutant in mutants()}
    assert {name: count for name, count in places.items() if count != 1} == {}


def test_their_tests_exist() -> None:
    files = {word for mutant in mutants() for word in mutant.tests if word.endswith(".py")}
    assert [name for name in sorted(files) if not (ROOT / name).is_file()] == []
