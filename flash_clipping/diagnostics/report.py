"""What a check returns, and how it reads."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ParameterReport:
    """One parameter against the oracle.

    Attributes:
        name: as in ``model.named_parameters()``.
        layer: path of the module that owns it; ``layer_type`` is that module's class.
        status: ``"PASS"``, ``"FAIL"``; or not covered: ``"frozen"``, or ``"unused"``, if the loss
            of this batch does not depend on it.
        rule: class of its rule; ``"bare"`` for a parameter that a module without a
            rule reads itself; ``"sample by sample"`` of a model that runs once for each.
        norms: norm of every sample's gradient, ``B`` numbers; ``oracle_norms`` by the oracle.
        norm_error: largest relative error over the samples.
        sum_error: error of the clipped sum, relative to its largest element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: str
    layer_type: str
    status: str
    rule: str = ""
    norms: tuple[float, ...] = ()
    oracle_norms: tuple[float, ...] = ()
    norm_error: float = math.nan
    sum_error: float = math.nan


@dataclass(frozen=True)
class CheckReport:
    """Result of :func:`flash_clipping.diagnostics.check`.

    Attributes:
        failures: a text for each cause of failures; empty when the model passed.
        notes: what the reader should know about how the check was done.
        batch_size: number of samples ``B``.
        dtype: the narrowest dtype that took part; it decides the tolerance.
        tolerance: relative error allowed.
        max_grad_norm: clipping bound that was used for the clipped sums.
        norms: norm of every sample's gradient over all parameters; ``oracle_norms`` by the oracle.
        norm_error: largest relative error over the samples.
        parameters: one report per parameter, in the model's order; none where the step failed.
        changes: largest relative change of a sample's norm in each other batch of the same samples.
    """

    failures: tuple[str, ...]
    notes: tuple[str, ...] = ()
    batch_size: int = 0
    dtype: str = ""
    tolerance: float = math.nan
    max_grad_norm: float = math.nan
    norms: tuple[float, ...] = ()
    oracle_norms: tuple[float, ...] = ()
    norm_error: float = math.nan
    parameters: tuple[ParameterReport, ...] = ()
    changes: tuple[float, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON; numbers that JSON lacks become ``"nan"``, ``"inf"``, ``"-inf"``."""
        text = json.dumps({"passed": self.passed} | asdict(self))
        plain: dict[str, Any] = json.loads(text, parse_constant=lambda name: str(float(name)))
        return plain

    def __str__(self) -> str:
        blocks = [_table(self.parameters)] if self.parameters else []
        return "\n".join([*blocks, *_summary(self)])


_HEADER = "parameter", "shape", "rule", "norm", "oracle", "error", "sum error", ""

_RULES = {
    "bare": "read by a module without a rule",
    "sample by sample": "the model runs once for each sample, which is slow",
}


def _table(parameters: tuple[ParameterReport, ...]) -> str:
    """Layers and parameters, with aligned columns.

    ``norm`` and ``oracle`` are the largest over the samples; ``error`` is the largest relative
    error of any sample, ``sum error`` that of the clipped sum.
    """
    rows = [_HEADER, *map(_row, parameters)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for place in range(len(parameters), 0, -1):
        layer = parameters[place - 1].layer
        if place == 1 or parameters[place - 2].layer != layer:
            lines.insert(place, f"{layer or 'the model'} ({parameters[place - 1].layer_type})")
    return "\n".join([*lines, ""])


def _row(parameter: ParameterReport) -> tuple[str, ...]:
    numbers = (
        ("{:.4g}", max(parameter.norms, default=math.nan)),
        ("{:.4g}", max(parameter.oracle_norms, default=math.nan)),
        ("{:.1e}", parameter.norm_error),
        ("{:.1e}", parameter.sum_error),
    )
    return (
        f"  {parameter.name.rpartition('.')[2]}",
        "x".join(map(str, parameter.shape)) or "1",
        parameter.rule,
        *("" if math.isnan(value) else form.format(value) for form, value in numbers),
        parameter.status,
    )


def _summary(report: CheckReport) -> list[str]:
    """What the table cannot say, as lines of text; the last one is the verdict."""
    said: list[str] = []
    if report.norms:
        clipped = sum(norm > report.max_grad_norm for norm in report.oracle_norms)
        said.append(
            f"{report.batch_size} samples, {report.dtype}, tolerance {report.tolerance:.0e}. "
            f"Norms over all parameters: error {report.norm_error:.1e}. Clipped sums with "
            f"C = {report.max_grad_norm:.4g} ({clipped} of {report.batch_size} samples clipped)."
        )
    if report.changes:
        said.append(
            f"{len(report.changes)} other batches of the same samples: norms change by "
            f"{max(report.changes):.1e} at most."
        )
    served = {rule for parameter in report.parameters for rule in parameter.rule.split(" + ")}
    said += [f"Rule {rule!r}: {meaning}." for rule, meaning in _RULES.items() if rule in served]
    said += [f"Note: {note}" for note in report.notes]
    said += [f"FAIL: {failure}" for failure in report.failures]
    return [*map(_wrapped, said), "PASS" if report.passed else "FAILED"]


def _wrapped(text: str) -> str:
    """Lines of at most 100 characters; lines of code stay as they are."""
    lines = text.replace("\n", "\n  ").splitlines()
    return "\n".join(
        line if line.startswith("      ") else textwrap.fill(line, 100, subsequent_indent="  ")
        for line in lines
    )


def listed(names: Sequence[str], most: int) -> str:
    """The first of these, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def described(error: BaseException) -> str:
    """What an error says, with its type where it is not this library's own."""
    text, kind = str(error).strip() or repr(error), type(error).__name__
    return text if kind == "FlashClippingError" else f"{text} ({kind})"
