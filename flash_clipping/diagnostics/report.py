"""What a check returns, and how it reads."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

PASS, FAIL = "PASS", "FAIL"
FROZEN, UNUSED, REFUSED, UNCHECKED = "frozen", "unused", "refused", "not checked"


@dataclass(frozen=True)
class ParameterReport:
    """One parameter against the oracle.

    Attributes:
        name: as in ``model.named_parameters()``.
        layer: path of the module that owns it; ``layer_type`` is that module's class.
        status: ``"PASS"``, ``"FAIL"``; or not covered: ``"frozen"``, ``"unused"``, ``"refused"``,
            ``"not checked"``, with the reason in ``reason``.
        rule: class of the rule that served it; ``"bare"`` for a parameter that a module without a
            rule reads itself; ``"sample by sample"`` of one whose forward runs once for each.
        factor: class of what the rule recorded, from which norms and sums are computed.
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
    reason: str = ""
    rule: str = ""
    factor: str = ""
    norms: tuple[float, ...] = ()
    oracle_norms: tuple[float, ...] = ()
    norm_error: float = math.nan
    sum_error: float = math.nan


@dataclass(frozen=True)
class RemovalReport:
    """What happened to the other samples' norms when one sample was taken out of the batch.

    Attributes:
        sample: the sample that was removed.
        error: largest relative change of another sample's norm; NaN when the step failed.
        reason: why the step failed, if it did.
        passed: whether the norms stayed, within the tolerance.
    """

    sample: int
    error: float
    reason: str
    passed: bool


@dataclass(frozen=True)
class CheckReport:
    """Result of :func:`flash_clipping.diagnostics.check`.

    Attributes:
        failures: one sentence for everything that failed; empty when the model passed.
        notes: what the reader should know about how the check was done.
        batch_size: number of samples ``B``.
        dtype: the narrowest dtype that took part; it decides the tolerance.
        tolerance: relative error allowed.
        max_grad_norm: clipping bound that was used for the clipped sums.
        norms: norm of every sample's gradient over all parameters; ``oracle_norms`` by the oracle.
        norm_error: largest relative error over the samples.
        parameters: one report per parameter, in the model's order.
        removals: one report per removed sample.
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
    removals: tuple[RemovalReport, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON; numbers that JSON lacks become ``"nan"``, ``"inf"``, ``"-inf"``."""
        return {"passed": self.passed, **_json_safe(dataclasses.asdict(self))}

    def __str__(self) -> str:
        return "\n".join([*_aligned(table(self)), "", *summary(self)])


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_safe(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


HEADER = (*("parameter", "shape", "rule", "factor", "norm", "oracle", "error", "sum error", ""),)


def table(report: CheckReport) -> list[tuple[str, ...]]:
    """The report as rows of text: :data:`HEADER`, then layers and parameters.

    ``norm`` and ``oracle`` are the largest over the samples; ``error`` is the largest relative
    error of any sample, ``sum error`` that of the clipped sum.
    """
    rows: list[tuple[str, ...]] = [HEADER]
    blank = ("",) * (len(HEADER) - 1)
    layer = None
    for parameter in report.parameters:
        if parameter.layer != layer:
            layer = parameter.layer
            rows.append((f"{layer or 'the model'} ({parameter.layer_type})", *blank))
        numbers = (
            _number(max(parameter.norms, default=math.nan), "{:.4g}"),
            _number(max(parameter.oracle_norms, default=math.nan), "{:.4g}"),
            _number(parameter.norm_error, "{:.1e}"),
            _number(parameter.sum_error, "{:.1e}"),
        )
        local = parameter.name.removeprefix(f"{layer}.") if layer else parameter.name
        rows.append(
            (
                f"  {local}",
                "x".join(map(str, parameter.shape)) or "1",
                parameter.rule,
                parameter.factor,
                *numbers,
                parameter.status,
            )
        )
    return rows


def summary(report: CheckReport) -> list[str]:
    """What the table cannot say, as lines of text; the last one is the verdict."""
    lines = []
    if report.norms:
        clipped = sum(norm > report.max_grad_norm for norm in report.oracle_norms)
        lines.append(
            f"{report.batch_size} samples, {report.dtype}, tolerance {report.tolerance:.0e}. "
            f"Norms over all parameters: error {report.norm_error:.1e}. Clipped sums with "
            f"C = {report.max_grad_norm:.4g} ({clipped} of {report.batch_size} samples clipped)."
        )
    if report.removals:
        worst = max((r.error for r in report.removals if not math.isnan(r.error)), default=math.nan)
        kept = sum(removal.passed for removal in report.removals)
        lines.append(
            f"One sample removed: the others' norms stay in {kept} of {len(report.removals)} "
            f"cases (largest change {_number(worst, '{:.1e}') or 'unknown'})."
        )
    reasons: dict[str, list[str]] = {}
    for parameter in report.parameters:
        if parameter.reason:
            covered = "Covered, but" if parameter.status == FAIL else "Not covered"
            reason = parameter.reason.removesuffix(".")
            if parameter.reason in report.failures:
                reason = "see below"
            key = f"{covered} ({parameter.status}; {reason})"
            reasons.setdefault(key, []).append(parameter.name)
    for reason, names in reasons.items():
        shown = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
        lines.append(f"{reason}: {shown}.")
    lines += [f"Note: {note}" for note in report.notes]
    lines += [f"FAIL: {failure}" for failure in report.failures]
    lines.append("PASS" if report.passed else "FAILED")
    return lines


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else form.format(value)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines with aligned columns; a layer's own line may be as long as it likes."""
    cells = [row for row in rows if any(row[1:])]
    widths = [max(len(row[column]) for row in cells) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
