"""Reports of what a run promises, as JSON, and what several of them promise together.

A report says what ε depends on: who took part in which steps, noise, which datasets are compared,
what is assumed, seeds and versions. It has no data, and no key.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args, get_type_hints

from opacus.accountants import RDPAccountant

from flash_clipping.engine.accounting import (
    ADD_OR_REMOVE,
    SAMPLE,
    FeasiblePrvAccountant,
    process_of,
    without_hints,
)
from flash_clipping.errors import InvalidValue, check_one_of, checked_number
from flash_clipping.noise.accountants import DiscreteGaussianAccountant, releases_of
from flash_clipping.noise.releases import Release, epsilon_by_pld

#: Of the form of reports, raised when a reader of an older one would be misled.
FORMAT = 1

_TAKES_PART: tuple[str, ...] = get_args(get_type_hints(Release)["takes_part"])

#: Who may take part in a release, by the names of accountants; and why there is no other ε.
_KNOWN: dict[str, tuple[tuple[str, ...], str]] = {
    "pld": (_TAKES_PART, ""),
    "prv": (("poisson",), "knows Poisson batches with independent noise only"),
    "rdp": (("poisson", "always"), "knows Gaussian mechanisms, also of Poisson batches, only"),
}

_PACKAGES = ("flash-clipping", "opacus", "torch", "dp-accounting", "numpy", "scipy")

_ASSUMPTIONS = (
    "Who takes part in a step, and the noise, are secret: nobody knows the key of the stream.",
    "A sample's loss depends on that sample alone.",
    "The bound that samples are clipped to is the one that noise is for.",
    "Number of steps, sample rate, bound and the expected batch size are public constants, the "
    "same for both datasets.",
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a report says, under the names that it has there.

    Attributes:
        epsilon: by the names of accountants: ε or None, whether it is a bound, and why not.
        violated: assumptions that did not hold.
        parts: runs, and statistics, that it is of.
    """

    format: int = FORMAT
    delta: float
    epsilon: dict[str, Any] = field(default_factory=dict)
    violated: Sequence[str] = ()
    relation: str
    unit: str
    assumptions: Sequence[str]
    seeds: Sequence[str] = ()
    parts: Sequence[dict[str, Any]]
    releases: Sequence[Release]
    versions: dict[str, str | None] = field(default_factory=dict)

    def finished(self) -> dict[str, Any]:
        """With ε and versions, in plain values."""
        checked_number("delta", self.delta, "(0, 0.5)", example=1e-5)
        epsilon = {name: self._epsilon(name) for name in _KNOWN}
        return asdict(replace(self, epsilon=epsilon, versions=_versions()))

    def _epsilon(self, name: str) -> dict[str, Any]:
        found, why = _epsilon(name, self.releases, self.delta)
        if found == math.inf:  # no JSON
            return {"epsilon": None, "is_bound": True, "why": "infinite: there is next to no noise"}
        if found is not None and self.violated:
            why = "what is assumed is violated"
        return {"epsilon": found, "is_bound": not why, "why": why or None}


def make_report(engine: Any, delta: float) -> dict[str, Any]:
    """See :meth:`~flash_clipping.FlashPrivacyEngine.report`."""
    accountant, process = engine.accountant, process_of(engine.accountant)
    is_discrete = isinstance(accountant, DiscreteGaussianAccountant)
    names = "noise_multiplier", "sample_rate", "steps"
    part = {
        "accountant": accountant.mechanism(),
        "process": process.state_dict(),
        "noise": "discrete" if is_discrete else "continuous",
        "samples": engine._samples,
        "steps": sum(steps for *_, steps in accountant.history),
        "history": [dict(zip(names, entry, strict=True)) for entry in accountant.history],
    }
    warned = engine._warned_not_poisson
    return Report(
        delta=delta,
        relation=process.relation,
        unit=engine._unit,
        assumptions=[process.takes_part, *_ASSUMPTIONS],
        violated=["Batches are not those that are accounted for."] if warned else [],
        seeds=[] if engine.stream.seed is None else [str(engine.stream.seed)],
        parts=[part],
        releases=[replace(one, is_discrete=is_discrete) for one in releases_of(accountant)],
    ).finished()


def statistics_report(
    name: str,
    *,
    sensitivity: float,
    standard_deviation: float,
    delta: float,
    times: int = 1,
    relation: str = ADD_OR_REMOVE,
    unit: str = SAMPLE,
) -> dict[str, Any]:
    """A report of statistics that were released with Gaussian noise, to compose with those of runs.

    Args:
        name: of the statistics.
        sensitivity: the most that they change, in the Euclidean norm, between neighbours.
        standard_deviation: of the noise on each number.
        delta: δ.
        times: how often.
        relation, unit: in which neighbours differ, in words: those of the run's report.

    Raises:
        ValueError: a sensitivity or a number of times that is not positive; negative noise.
    """
    checked_number("sensitivity", sensitivity, "(0, inf)", example=1.0)
    checked_number("standard_deviation", standard_deviation, "[0, inf)", example=1.0)
    checked_number("times", times, "[1, inf)", example=1, whole=True)
    given = {"sensitivity": sensitivity, "standard_deviation": standard_deviation, "times": times}
    return Report(
        delta=delta,
        relation=relation,
        unit=unit,
        assumptions=[f"{name}: the sensitivity is as given, whatever the data are."],
        parts=[{"statistics": name, **given}],
        releases=[Release(standard_deviation / sensitivity, times)],
    ).finished()


def compose(reports: Sequence[dict[str, Any]], *, delta: float | None = None) -> dict[str, Any]:
    """The report of everything that these reports are of, released from one dataset.

    Args:
        reports: as :meth:`~flash_clipping.FlashPrivacyEngine.report`, :func:`statistics_report` and
            this function make them; also after JSON.
        delta: δ; by default that of the reports.

    Guarantees:
        Distributions of privacy losses are composed, not ε's: less than their sum. Each release
        may depend on those before it.

    Raises:
        ValueError: no report, another form of report, different neighbours, or δ's that differ
            where none is given.
    """
    if not reports:
        raise InvalidValue("FC568 compose: found no report; expected one or more.")
    read = [_read(number, report) for number, report in enumerate(reports)]
    relations = {(report.relation, report.unit) for report in read}
    deltas = {report.delta for report in read}
    if len(relations) > 1:
        listed = "; ".join(f"{relation}: {unit}" for relation, unit in sorted(relations))
        raise InvalidValue(
            f"FC568 compose: found reports for different neighbours ({listed}); expected one "
            "relation and one unit. Their epsilons are for different promises, and have no sum."
        )
    relation, unit = relations.pop()
    if delta is None and len(deltas) > 1:
        raise InvalidValue(
            f"FC568 compose: found reports for different deltas {sorted(deltas)}; expected one. "
            "Say which:\n"
            "    delta=1e-5"
        )

    def all_of(name: str) -> list[Any]:
        return [one for report in read for one in getattr(report, name)]

    return Report(
        delta=deltas.pop() if delta is None else delta,
        relation=relation,
        unit=unit,
        assumptions=[*dict.fromkeys(all_of("assumptions"))],
        violated=[*dict.fromkeys(all_of("violated"))],
        seeds=[*dict.fromkeys(all_of("seeds"))],
        parts=all_of("parts"),
        releases=all_of("releases"),
    ).finished()


def _read(number: int, given: Any) -> Report:
    """A report from plain values; ``ValueError`` for another form of report."""
    try:
        report = Report(**given)
        report = replace(report, releases=[Release(**one) for one in given["releases"]])
    except TypeError as error:
        raise InvalidValue(
            f"FC568 compose: report {number} cannot be read ({error}); expected what "
            "engine.report(delta) makes."
        ) from error
    if report.format != FORMAT:
        raise InvalidValue(
            f"FC568 compose: found format {report.format!r} in report {number}; expected {FORMAT}."
        )
    for release in report.releases:
        checked_number("noise_multiplier", release.noise_multiplier, "[0, inf)", example=1.0)
        checked_number("times", release.times, "[0, inf)", example=1, whole=True)
        checked_number("rate", release.rate, "[0, 1]", example=0.01)
        check_one_of("takes_part", release.takes_part, _TAKES_PART)
    return report


def _epsilon(name: str, releases: Sequence[Release], delta: float) -> tuple[float | None, str]:
    """What one accountant says of these releases, and why it is no bound, or none is known."""
    known, why = _KNOWN[name]
    is_discrete = any(r.is_discrete for r in releases)
    if any(r.noise_multiplier == 0 for r in releases):
        return math.inf, ""
    if not releases:
        return 0.0, ""
    if is_discrete and name != "rdp":
        return None, "not proven for discrete noise"
    if any(r.takes_part not in known for r in releases):
        return None, why
    if name == "pld":
        try:
            return epsilon_by_pld(tuple(releases), delta), ""
        except ImportError as error:
            return None, str(error)
    accountant: Any = FeasiblePrvAccountant() if name == "prv" else RDPAccountant()
    accountant = DiscreteGaussianAccountant() if is_discrete else accountant
    accountant.history = [(r.noise_multiplier, r.rate, r.times) for r in releases]
    with without_hints():
        return float(accountant.get_epsilon(delta)), ""


def _versions() -> dict[str, str | None]:
    found = {"python": platform.python_version(), **dict.fromkeys(_PACKAGES)}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
