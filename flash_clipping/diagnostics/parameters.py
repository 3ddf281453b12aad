"""One parameter beside the oracle: norms, clipped sum, sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flash_clipping.diagnostics.oracle import FLOOR, Oracle, largest_norm_error, largest_sum_error
from flash_clipping.diagnostics.report import (
    FAIL,
    FROZEN,
    PASS,
    REFUSED,
    UNCHECKED,
    UNUSED,
    ParameterReport,
    SectionReport,
)
from flash_clipping.diagnostics.sections import Owned, owned_parameters
from flash_clipping.diagnostics.watch import Flash, Subject, floats


def compared_parameters(
    subject: Subject, flash: Flash, oracle: Oracle, tolerance: float
) -> Iterator[ParameterReport]:
    """The norms and the clipped sums of all parameters, and of their sections, beside the
    oracle's."""
    for owned in owned_parameters(subject.plain):
        if not owned.param.requires_grad:
            yield _report(owned, FROZEN, reason="requires_grad is False")
        elif owned.name not in flash.seen and not oracle.reached[owned.name]:
            reason = "the loss does not depend on it with this batch"
            yield _report(owned, UNUSED, reason=reason)
        else:
            yield _compared(owned, flash, oracle, tolerance)


def _compared(owned: Owned, flash: Flash, oracle: Oracle, tolerance: float) -> ParameterReport:
    name, seen = owned.name, flash.seen.get(owned.name)
    norms, grad = floats(getattr(flash.params[name], "_norm_sample")), flash.grad(name)  # noqa: B009
    floor = FLOOR[flash.dtype]
    least_sum = oracle.largest_sum * floor
    norm_error = largest_norm_error(norms, oracle.param_norms[name], oracle.norms, floor)
    sum_error = largest_sum_error(grad, oracle.sums[name], least_sum)
    parts = []
    if (sections := flash.sections.get(name)) is not None:
        for part, found, expected, found_norms, expected_norms in zip(
            sections.names,
            sections.of(grad),
            sections.of(oracle.sums[name]),
            flash.section_norms(name),
            oracle.section_norms[name],
            strict=True,
        ):
            errors = (
                largest_norm_error(found_norms, expected_norms, oracle.norms, floor),
                largest_sum_error(found, expected, least_sum),
            )
            parts.append(SectionReport(part, *errors, max(errors) <= tolerance))
    passed = max(norm_error, sum_error) <= tolerance and all(part.passed for part in parts)
    return _report(
        owned,
        PASS if passed else FAIL,
        reason="" if passed or seen is not None else "its gradient never reached a rule",
        rule=" + ".join(seen.rules) if seen else "",
        algorithm=" + ".join(seen.algorithms) if seen else "",
        backend=" + ".join(seen.backends) if seen else "",
        norms=norms,
        oracle_norms=tuple(oracle.param_norms[name]),
        norm_error=norm_error,
        sum_error=sum_error,
        sections=tuple(parts),
    )


def uncovered_parameters(subject: Subject, error: str) -> Iterator[ParameterReport]:
    """Nothing could be compared: which parameters that leaves uncovered, and why."""
    lines = error.splitlines()  # an error may name several layers, one a line
    for owned in owned_parameters(subject.plain):
        kind = type(owned.owner).__name__
        # As this library names a module, and as Opacus does.
        named = f"{owned.path or 'the model'} ({kind})"
        if not owned.param.requires_grad:
            yield _report(owned, FROZEN, reason="requires_grad is False")
        elif any(line.startswith(named) for line in lines) or f"({owned.path}:{kind}(" in error:
            yield _report(owned, REFUSED, reason=error)
        else:
            reason = "the check stopped before this parameter"
            yield _report(owned, UNCHECKED, reason=reason)


def _report(owned: Owned, status: str, **more: Any) -> ParameterReport:
    return ParameterReport(
        name=owned.name,
        shape=tuple(owned.param.shape),
        dtype=str(owned.param.dtype).removeprefix("torch."),
        layer=owned.path,
        layer_type=type(owned.owner).__name__,
        status=status,
        **more,
    )
