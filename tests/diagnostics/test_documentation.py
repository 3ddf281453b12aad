"""The documentation: its rule works, its links lead somewhere, the tests it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from flash_clipping import Rule
from flash_clipping.diagnostics import check
from tests.support.models import Wrapped

# -- a rule of one's own, as docs/layers.md shows it ----------------------------------------------


def test_the_rule_in_the_documentation_works(own_rules: None) -> None:
    page = (Path(__file__).parents[2] / "docs" / "layers.md").read_text()
    block = page.split("<!-- tested: a rule of one's own -->")[1].split("```")[1]
    namespace: dict[str, object] = {}
    exec(block.removeprefix("python\n"), namespace)  # noqa: S102
    layer_type, rule_type = namespace["LowRankLinear"], namespace["LowRankLinearRule"]
    assert issubclass(rule_type, Rule)
    model = Wrapped(nn.Linear(5, 8), layer_type(8, 6, rank=2), nn.Linear(6, 3))
    report = check(model, torch.randn(4, 7, 5), dtype=torch.float64)
    assert report.passed, str(report)
    served = {p.rule for p in report.parameters if p.layer_type == "LowRankLinear"}
    assert served == {"LowRankLinearRule"}


# -- the documentation ----------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def anchors(page: Path) -> set[str]:
    """The anchors that a Markdown renderer makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_the_documentation_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize(
    ("page", "least"), [("guarantees.md", 15), ("attacks.md", 15), ("migrating-from-opacus.md", 2)]
)
def test_tests_that_are_named_in_the_documentation_exist(page: str, least: int) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / page).read_text())
    assert len(named) >= least
    for file, test in named:
        assert (ROOT / file).exists(), file
        source = (ROOT / file).read_text()
        assert not test or re.search(rf"^\s*(def|class) {test}\b", source, re.MULTILINE), test
