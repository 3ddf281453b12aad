"""Proof that what is clipped is each sample's own gradient.

:mod:`oracle` compares gradients through the taps with plain autograd's, :mod:`probe` finds where the
samples are in what layers return, :mod:`coverage` says when to look again. Nothing here decides by
the size of an axis, and nothing of the user's is changed: parameters, buffers, ``p.grad``, random
number generators and hooks are afterwards what they were, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from flash_clipping.capture.proof.coverage import Coverage
from flash_clipping.capture.proof.layout import CONSTANT, SampleLayout, Table
from flash_clipping.capture.proof.oracle import examine, refusal
from flash_clipping.capture.proof.probe import probe
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import FlashClippingError

__all__ = ["CONSTANT", "Coverage", "SampleLayout", "Table", "prove", "prove_forward"]


def prove(
    wrapped: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    session: ClippingSession | None = None,
    *,
    audit: int = 0,
    skip: Collection[str] = (),
) -> Table:
    """Show, on one batch, that each sample's gradient is its own and is booked to it.

    Args:
        wrapped: a wrapped model.
        args, kwargs: what it is called with.
        session: what its taps share.
        audit: 0 for the proof before the first step, then the number of the audit.
        skip: parts of the oracle to leave out, for tests.

    Returns:
        Where the samples are in what layers return, and which outputs may go backward.

    Raises:
        FlashClippingError: with the parameters or outputs, what was found and expected, and what to
            write.
    """
    root = wrapped._module
    forward = getattr(root.forward, "original", root.forward)
    session = session or wrapped._session
    return prove_forward(root, forward, session, args, kwargs, audit=audit, skip=skip)


def prove_forward(
    root: nn.Module,
    forward: Callable[..., Any],
    session: ClippingSession,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    audit: int = 0,
    skip: Collection[str] = (),
) -> Table:
    """:func:`prove` for a model whose ``forward`` is given."""
    begin = time.process_time()
    verdict = examine(root, forward, session, args, kwargs, audit=audit, skip=skip)
    shown = time.process_time()
    if (error := refusal(verdict)) is not None:
        raise error
    layouts: dict[str, tuple[SampleLayout, ...]] = {}
    if verdict.outputs and audit == 0:
        layouts = probe(root, forward, session, args, kwargs, verdict.outputs)
    seconds = {"oracle": shown - begin, "probe": time.process_time() - shown}
    return Table(layouts, verdict.unfit, verdict.outputs, verdict.notes, seconds)


