"""One parameter beside the oracle: norms, clipped sum, sections."""

from __future__ import annotations

from typing import Any

from torch import nn

from flash_clipping.diagnostics.oracle import Oracle, largest_norm_error, largest_sum_error
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
from flash_clipping.diagnostics.sections import owned_parameters, section_axis
from flash_clipping.diagnostics.watch import Flash, Subject, floats


def compared_parameter(
    subject: Subject,
    name: str,
    param: nn.Parameter,
    path: str,
    owner: nn.Module,
    flash: Flash,
    oracle: Oracle,
    tolerance: float,
    floor: float,
) -> ParameterReport:
    """The norms and the clipped sum of one parameter, and of its sections, beside the oracle's."""
    if not param.requires_grad:
        return _parameter(name, param, path, owner, FROZEN, reason="requires_grad is False")
    seen = flash.seen.get(name)
    if seen is None and not oracle.reached[name]:
        reason = "the loss does not depend on it with this batch"
        return _parameter(name, param, path, owner, UNUSED, reason=reason)
    norms = floats(flash.norms_of(name))
    grad = flash.grad(name)
    scale = oracle.largest_sum * floor
    norm_error = largest_norm_error(norms, oracle.param_norms[name], oracle.norms, floor)
    sum_error = largest_sum_error(grad, oracle.sums[name], scale)
    parts = []
    if name in subject.sections:
        axis = section_axis(subject.plain, name)
        names = subject.sections[name]
        chunks = zip(
            names,
            grad.chunk(len(names), axis),
            oracle.sums[name].chunk(len(names), axis),
            oracle.section_norms[name],
            flash.section_norms(name),
            strict=True,
        )
        for part, found, expected, expected_norms, found_norms in chunks:
            errors = (
                largest_norm_error(found_norms, expected_norms, oracle.norms, floor),
                largest_sum_error(found, expected, scale),
            )
            passed = all(error <= tolerance for error in errors)
            parts.append(SectionReport(part, *errors, passed))
    passed = (
        norm_error <= tolerance
        and sum_error <= tolerance
        and all(section.passed for section in parts)
    )
    reason = "" if passed or seen is not None else "its gradient never reached a rule"
    return _parameter(
        name,
        param,
        path,
        owner,
        PASS if passed else FAIL,
        reason=reason,
        rule=seen.rule if seen else "",
        algorithm=" + ".join(seen.algorithms) if seen else "",
        backend=" + ".join(seen.backends) if seen else "",
        norms=norms,
        oracle_norms=oracle.param_norms[name],
        norm_error=norm_error,
        sum_error=sum_error,
        sections=tuple(parts),
    )


def uncovered_parameters(subject: Subject, error: str) -> tuple[ParameterReport, ...]:
    """Nothing could be compared: which parameters that leaves uncovered, and why."""
    culprits = set()
    lines = error.splitlines()  # an error may name several layers, one a line
    for path, module in subject.plain.named_modules():
        kind = type(module).__name__
        # As this library names a module, and as Opacus does.
        named = f"{path or 'the model'} ({kind})"
        if any(line.startswith(named) for line in lines) or f"({path}:{kind}(" in error:
            culprits.add(path)
    parameters = []
    for name, param, path, owner in owned_parameters(subject.plain):
        if not param.requires_grad:
            status, reason = FROZEN, "requires_grad is False"
        elif path in culprits:
            status, reason = REFUSED, error
        else:
            status, reason = UNCHECKED, "the check stopped before this parameter"
        parameters.append(_parameter(name, param, path, owner, status, reason=reason))
    return tuple(parameters)


def _parameter(
    name: str, param: nn.Parameter, path: str, owner: nn.Module, status: str, **more: Any
) -> ParameterReport:
    return ParameterReport(
        name=name,
        shape=tuple(param.shape),
        dtype=str(param.dtype).removeprefix("torch."),
        layer=path,
        layer_type=type(owner).__name__,
        status=status,
        **more,
    )
