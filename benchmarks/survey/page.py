"""``docs/models.md``: kinds that are exact as they are, and a row for each other kind."""

from __future__ import annotations

import importlib.metadata
import json
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import table
from benchmarks.survey.kinds import Kind
from benchmarks.survey.measure import DRAWS, EXACT, FAILED, MIXES, REFUSED, WRONG, Outcome
from benchmarks.survey.modes import MODES
from benchmarks.survey.pool import GROUP_NORM, Finding

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "models.md"
START, END = "<!-- survey:start -->", "<!-- survey:end -->"

#: Characters of a message that the page shows.
SHOWN = 200


#: What a table says of a kind: as it is, errors, what helps.
Cells = tuple[str, str, str]

#: A bar that ends a cell; those in messages are escaped.
_BAR = re.compile(r"(?<!\\)\|")

_NOT_MEASURED: Cells = ("not measured", "", "")

_EXACT = "Exact as they are, with relative errors of at most {}, {}:"
_LISTED = re.compile(_EXACT.format(r"(\S+)", r"(\S+)") + r"(.*?)\.\n\n", re.DOTALL)

#: Columns of a line of names.
WIDTH = 130

#: Between names of a list; some names hold a comma.
BETWEEN = " · "


def written(text: str) -> dict[str, Cells]:
    """What a page says now of every kind that was measured; of those that are exact, it has the
    largest errors of their section."""
    found: dict[str, Cells] = {}
    for norms, sums, listed in _LISTED.findall(text):
        for name in " ".join(listed.split()).split(BETWEEN):
            found[name.strip("`")] = EXACT, f"{norms}, {sums}", ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in _BAR.split(line)[1:-1]]
        if len(cells) == 4 and cells[1] not in ("as it is", "---:", _NOT_MEASURED[0]):
            found[cells[0].strip("`")] = (cells[1], cells[2], cells[3])
    return found


def render(
    sections: Mapping[str, Mapping[str, Kind]],
    found: Mapping[str, Finding],
    kept: Mapping[str, Cells],
) -> str:
    """Markdown: what was found of all together, and for each section a list and a table.

    Args:
        sections: every kind.
        found: what was measured now.
        kept: what the page says of kinds that were measured before.
    """
    versions = f"torch {torch.__version__.split('+')[0]}, transformers " + (
        importlib.metadata.version("transformers")
    )
    names = [name for kinds in sections.values() for name in kinds]
    cells = {name: kept[name] for name in names if name in kept}
    cells |= {name: _cells(finding) for name, finding in found.items()}
    parts = [f"{versions}, on a CPU. {summary(cells.values(), len(names))}\n"]
    for title, kinds in sections.items():
        parts.append(f"### {title}\n")
        shown = {
            f"`{name}`" if " " not in name else name: cells.get(name, _NOT_MEASURED)
            for name in kinds
        }
        if exact := [name for name, (as_it_is, *_) in shown.items() if as_it_is == EXACT]:
            parts.append(f"{_listed(exact, [shown[name][1] for name in exact])}\n")
        if lines := [[name, *of] for name, of in shown.items() if of[0] != EXACT]:
            parts.append(table(["kind", "as it is", "errors", "what helps"], lines))
    return "\n".join(parts)


def _listed(names: Sequence[str], errors: Sequence[str]) -> str:
    norms, sums = (max(of, key=float) for of in zip(*(e.split(", ") for e in errors), strict=True))
    text = f"{_EXACT.format(norms, sums)} {BETWEEN.join(names)}."
    return "\n".join(textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))


def summary(cells: Collection[Cells], kinds: int) -> str:
    """How many there are of which."""
    mixing = sum(help == GROUP_NORM.words for _, _, help in cells)
    failed = sum(as_it_is.startswith(FAILED) for as_it_is, _, _ in cells)
    exact = sum(as_it_is == EXACT for as_it_is, _, _ in cells)
    helped = sum(as_it_is != EXACT and bool(errors and help) for as_it_is, errors, help in cells)
    rest = len(cells) - mixing - failed
    return (
        f"{len(cells)} of {kinds} kinds were measured. {failed} did not run; {mixing} have "
        f"BatchNorm. Of the other {rest}, {exact} ({100 * exact / max(rest, 1):.0f} %) are exact "
        f"as they are. With the help of the last column, {helped} more are exact, of all."
    )


def show(files: Sequence[Path]) -> str:
    """Markdown: how many kinds came out how in each mode, and which did not come out exact.

    Args:
        files: JSON of ``--json``; those of one device and dtype are parts of one table.
    """
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for file in files:
        part = json.loads(file.read_text(encoding="utf-8"))
        of = found.setdefault((part["device"], part["dtype"] or "float64"), {})
        for mode, outcomes in part["modes"].items():
            of.setdefault(mode, {}).update(outcomes)
    verdicts = [EXACT, REFUSED, MIXES, DRAWS, WRONG, FAILED]
    lines, others = [], []
    for (device, dtype), modes in found.items():
        for mode, findings in modes.items():
            run = {name: x["outcome"] for name, x in findings.items() if x is not None}
            counts = Counter(outcome["verdict"] for outcome in run.values())
            title = f"{MODES[mode].words}, {device}, {dtype}"
            largest = max(
                (max(x["norms"], x["sums"]) for x in run.values() if x["verdict"] == EXACT),
                default=0.0,
            )
            cells = [str(counts[verdict]) for verdict in verdicts]
            lines.append([title, str(len(run)), *cells, f"{largest:.0e}"])
            for name, x in run.items():
                if x["verdict"] != EXACT:
                    errors = f"{x['norms']:.0e}, {x['sums']:.0e}"
                    words = (x["message"].splitlines() or [errors])[0][:SHOWN]
                    others.append(f"* {name}, {title}: {x['verdict']}: {words}")
    headings = ["mode", "run", *verdicts, "largest error of an exact one"]
    return "\n".join([table(headings, lines), *others])


def _cells(finding: Finding) -> Cells:
    outcome, helped = finding.outcome, finding.helped
    if outcome.verdict == EXACT:
        return EXACT, _errors(outcome), ""
    message = outcome.message.splitlines()[0] if outcome.message else ""
    if len(message) > SHOWN:
        message = message[:SHOWN].rsplit(" ", 1)[0] + " …"
    as_it_is = f"{outcome.verdict}: {message}" if message else outcome.verdict
    as_it_is = as_it_is.replace("|", "\\|").replace("<", "&lt;")
    if helped is None or finding.help is None:
        return as_it_is, "" if message else _errors(outcome), ""
    return as_it_is, _errors(helped) if helped.verdict == EXACT else "", finding.help.words


def _errors(outcome: Outcome) -> str:
    return f"{outcome.norms:.0e}, {outcome.sums:.0e}"
