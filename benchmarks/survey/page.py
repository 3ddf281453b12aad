"""``docs/models.md``: one row for each kind."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from benchmarks.report import table
from benchmarks.survey.kinds import Kind
from benchmarks.survey.measure import EXACT, Outcome
from benchmarks.survey.pool import GROUP_NORM, Finding

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "models.md"
START, END = "<!-- survey:start -->", "<!-- survey:end -->"

#: Characters of a message that the page shows.
SHOWN = 200


def render(sections: Mapping[str, Mapping[str, Kind]], found: Mapping[str, Finding]) -> str:
    """Markdown: what was found of all together, and a table for each section."""
    versions = f"torch {torch.__version__.split('+')[0]}, transformers " + (
        importlib.metadata.version("transformers")
    )
    parts = [f"{versions}, on a CPU. {summary(found.values())}\n"]
    for title, kinds in sections.items():
        lines = [
            [f"`{name}`" if " " not in name else name, *_row(found.get(name))] for name in kinds
        ]
        parts += [f"### {title}\n", table(["kind", "as it is", "errors", "what helps"], lines)]
    return "\n".join(parts)


def summary(found: Iterable[Finding]) -> str:
    """How many there are of which."""
    all_ = list(found)
    mixing = sum(finding.help is GROUP_NORM or finding.help == GROUP_NORM for finding in all_)
    exact = sum(finding.outcome.verdict == EXACT for finding in all_)
    helped = sum(finding.helped is not None and finding.helped.verdict == EXACT for finding in all_)
    rest = len(all_) - mixing
    return (
        f"{len(all_)} kinds were measured. {mixing} have BatchNorm; of the other {rest}, {exact} "
        f"({100 * exact / max(rest, 1):.0f} %) are exact as they are. With the help of the last "
        f"column, {helped} more are exact."
    )


def _row(finding: Finding | None) -> list[str]:
    return ["not measured", "", ""] if finding is None else _cells(finding)


def _cells(finding: Finding) -> list[str]:
    outcome, helped = finding.outcome, finding.helped
    if outcome.verdict == EXACT:
        return [EXACT, _errors(outcome), ""]
    message = outcome.message.splitlines()[0] if outcome.message else ""
    if len(message) > SHOWN:
        message = message[:SHOWN].rsplit(" ", 1)[0] + " …"
    as_it_is = f"{outcome.verdict}: {message}" if message else outcome.verdict
    as_it_is = as_it_is.replace("|", "\\|").replace("<", "&lt;")
    if helped is None or finding.help is None:
        return [as_it_is, "" if message else _errors(outcome), ""]
    return [as_it_is, _errors(helped) if helped.verdict == EXACT else "", finding.help.words]


def _errors(outcome: Outcome) -> str:
    return f"{outcome.norms:.0e}, {outcome.sums:.0e}"
