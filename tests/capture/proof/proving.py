"""How tests ask the oracle about a model, with today's own comparisons off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from flash_clipping import FlashClippingError, GradSampleModuleFlashClipping
from flash_clipping.capture.no_trace import ModelsOwnError
from flash_clipping.capture.proof import prove as proofs
from flash_clipping.capture.proof.gate import Gate
from flash_clipping.capture.proof.oracle import Examination, Table, examine
from flash_clipping.capture.proof.runs import Subject


@contextlib.contextmanager
def nothing_else_is_shown() -> Iterator[None]:
    """A look finds where samples lie, and nothing is refused."""
    with (
        mock.patch.object(proofs, "_confirm", lambda *_: None),
        mock.patch.object(Gate, "examine", lambda *_: None),
    ):
        yield


def wrapped(model: nn.Module, *args: Any, **options: Any) -> GradSampleModuleFlashClipping:
    """A wrapped model whose layers know which of their rows are samples."""
    kwargs = options.pop("kwargs", {})
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1e12, **options)
    with nothing_else_is_shown():
        flash(*args, **kwargs)
    return flash


def prove(
    wrapped: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    audit: int = 0,
) -> Table:
    """The oracle's table of a call of a wrapped model.

    Args:
        wrapped: a wrapped model.
        args, kwargs: what it is called with.
        audit: 0 for the proof before the first step, then the number of the audit.

    Raises:
        FlashClippingError: no output may go backward.
    """
    root, session = wrapped._module, wrapped._session
    forward = getattr(root.forward, "original", root.forward)
    for subject in (whole := Subject(root, forward, session, args, kwargs)).smaller(seed=audit):
        try:
            return _proven(subject, audit)
        except ModelsOwnError:
            if subject is whole:
                raise
    raise AssertionError


def _proven(subject: Subject, audit: int) -> Table:
    table = examine(subject, Examination(audit, brief=audit > 0, watched=not audit))
    if table.unfit and not table.outputs:
        raise FlashClippingError("\n".join(dict.fromkeys(table.unfit.values())))
    return table


def table_of(model: nn.Module, *args: Tensor, audits: int = 0, **options: Any) -> Table:
    """The table of a proof that some audits follow.

    Raises:
        FlashClippingError: it is refused.
    """
    kwargs = options.pop("kwargs", {})
    torch.manual_seed(0)
    flash = wrapped(model, *args, kwargs=kwargs, **options)
    with nothing_else_is_shown():
        table = prove(flash, args, kwargs)
        for audit in range(1, audits + 1):
            prove(flash, args, kwargs, audit=audit)
    return table


def why_refused(model: nn.Module, *args: Tensor, **options: Any) -> str:
    """Why a proof, or an audit, refuses a model; empty if it does not."""
    try:
        table_of(model, *args, **options)
    except FlashClippingError as error:
        return str(error)
    return ""
