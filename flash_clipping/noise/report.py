"""Reports of what a run promises, as JSON, and what several of them promise together.

A report says what ε depends on: who took part in which steps, noise, which datasets are compared,
what is assumed, seeds and versions. It has no data, and no key.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args, get_type_hints

from opacus.accountants import RDPAccountant
from opacus.accountants.analysis import gdp

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

_NEEDED = ("delta", "relation", "unit", "assumptions", "violated", "seeds", "parts", "releases")

#: Who may take part in a release, by the names of accountants; and why there is no other ε.
_KNOWN: dict[str, tuple[str, ...]] = {
    "pld": get_args(get_type_hints(Release)["takes_part"]),
    "prv": ("poisson",),
    "rdp": ("poisson", "always"),
    "gdp": ("poisson", "always"),
}
_WHY_NOT = {
    "prv": "knows Poisson batches with independent noise only",
    "rdp": "knows Gaussian mechanisms, also of Poisson batches, only",
    "gdp": "knows Gaussian mechanisms, or Poisson batches of one rate and noise, only",
}

#: Opacus looks for ε up to 500, and takes an exponential of one over the squared noise.
_LARGEST_MU, _LEAST_NOISE_OF_GDP = 20.0, 0.04

_PACKAGES = ("flash-clipping", "opacus", "torch", "dp-accounting", "numpy", "scipy")

_ASSUMPTIONS = (
    "Who takes part in a step, and the noise, are secret: nobody knows the key of the stream.",
    "A sample's loss depends on that sample alone.",
    "The bound that samples are clipped to is the one that noise is for.",
    "Number of steps, sample rate, bound and the expected batch size are public constants, the "
    "same for both datasets.",
)


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
    return _report(
        [replace(release, is_discrete=is_discrete) for release in releases_of(accountant)],
        delta,
        relation=process.relation,
        unit=engine._unit,
        assumptions=[process.takes_part, *_ASSUMPTIONS],
        violated=["Batches are not those that are accounted for."] if warned else [],
        seeds=[] if engine.stream.seed is None else [str(engine.stream.seed)],
        parts=[part],
    )


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
    return _report(
        [Release(standard_deviation / sensitivity, times)],
        delta,
        relation=relation,
        unit=unit,
        assumptions=[f"{name}: the sensitivity is as given, whatever the data are."],
        violated=[],
        seeds=[],
        parts=[{"statistics": name, **given}],
    )


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
    for number, report in enumerate(reports):
        given = report if isinstance(report, dict) else {}
        found, missing = given.get("format"), [name for name in _NEEDED if name not in given]
        if found != FORMAT or missing:
            raise InvalidValue(
                f"FC568 compose: found format {found!r} in report {number}, without "
                f"{', '.join(missing) or 'nothing'}; expected {FORMAT}, as engine.report(delta) "
                "makes it."
            )
    relations = {(report["relation"], report["unit"]) for report in reports}
    deltas = {report["delta"] for report in reports}
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

    def all_of(key: str) -> list[Any]:
        return [one for report in reports for one in report[key]]

    try:
        releases = [_release(**release) for release in all_of("releases")]
    except TypeError as error:
        raise InvalidValue(
            f"FC568 compose: found releases that cannot be read ({error}); expected those of "
            "engine.report(delta)."
        ) from error
    return _report(
        releases,
        deltas.pop() if delta is None else delta,
        relation=relation,
        unit=unit,
        assumptions=[*dict.fromkeys(all_of("assumptions"))],
        violated=[*dict.fromkeys(all_of("violated"))],
        seeds=[*dict.fromkeys(all_of("seeds"))],
        parts=all_of("parts"),
    )


def _release(**fields: Any) -> Release:
    release = Release(**fields)
    checked_number("noise_multiplier", release.noise_multiplier, "[0, inf)", example=1.0)
    checked_number("times", release.times, "[0, inf)", example=1, whole=True)
    checked_number("rate", release.rate, "[0, 1]", example=0.01)
    check_one_of("takes_part", release.takes_part, _KNOWN["pld"])
    return release


def _report(
    releases: Sequence[Release], delta: float, *, violated: list[str], **said: Any
) -> dict[str, Any]:
    checked_number("delta", delta, "(0, 0.5)", example=1e-5)
    return {
        "format": FORMAT,
        "delta": delta,
        "epsilon": {name: _epsilon(name, releases, delta, bool(violated)) for name in _KNOWN},
        "violated": violated,
        **said,
        "releases": [*map(asdict, releases)],
        "versions": _versions(),
    }


def _epsilon(
    name: str, releases: Sequence[Release], delta: float, is_violated: bool
) -> dict[str, Any]:
    """What one accountant says of these releases."""
    found: float | None = None
    why = _WHY_NOT[name] if any(r.takes_part not in _KNOWN[name] for r in releases) else ""
    is_discrete = any(r.is_discrete for r in releases)
    if any(r.noise_multiplier == 0 for r in releases):
        found = math.inf
    elif not releases:
        found = 0.0
    elif is_discrete and name != "rdp":
        why = "not proven for discrete noise"
    elif name == "pld":
        try:
            found = epsilon_by_pld(tuple(releases), delta)
        except ImportError as error:
            why = str(error)
    elif name == "gdp":
        found, why = _by_gdp(releases, delta)
    elif not why:
        accountant: Any = FeasiblePrvAccountant() if name == "prv" else RDPAccountant()
        accountant = DiscreteGaussianAccountant() if is_discrete else accountant
        accountant.history = [(r.noise_multiplier, r.rate, r.times) for r in releases]
        with without_hints():
            found = float(accountant.get_epsilon(delta))
    if found == math.inf:  # no JSON
        return {"epsilon": None, "is_bound": True, "why": "infinite: there is next to no noise"}
    if found is not None and is_violated:
        why = "what is assumed is violated"
    return {"epsilon": found, "is_bound": not why, "why": why or None}


def _by_gdp(releases: Sequence[Release], delta: float) -> tuple[float | None, str]:
    """By a central limit; exactly, where everybody takes part."""
    why, kinds = "", {(r.takes_part, r.noise_multiplier, r.rate) for r in releases}
    if all(takes_part == "always" for takes_part, _, _ in kinds):
        mu = sum(r.times / r.noise_multiplier**2 for r in releases) ** 0.5
    elif len(kinds) > 1 or next(iter(kinds))[0] != "poisson":
        return None, _WHY_NOT["gdp"]
    else:
        _, noise, rate = kinds.pop()
        steps = sum(r.times for r in releases)
        mu, why = math.inf, "a limit for many steps, which may be too small"
        if noise > _LEAST_NOISE_OF_GDP:
            mu = gdp.compute_mu_poisson(steps=steps, noise_multiplier=noise, sample_rate=rate)
    if not mu < _LARGEST_MU:
        return None, "finds no epsilon this large"
    if mu == 0 or gdp.delta_eps_mu(eps=0, mu=mu) <= delta:
        return 0.0, why
    return float(gdp.eps_from_mu(mu=mu, delta=delta)), why


def _versions() -> dict[str, str | None]:
    found = {"python": platform.python_version(), **dict.fromkeys(_PACKAGES)}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
