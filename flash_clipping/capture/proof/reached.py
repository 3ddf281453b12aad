"""Layers that no run of a proof has reached: the call that reached them is looked at itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.no_trace import MODELS_OWN
from flash_clipping.capture.proof.oracle import STRAY
from flash_clipping.capture.proof.probe import marks_of
from flash_clipping.capture.proof.runs import Runs, Subject
from flash_clipping.errors import FlashClippingError, to_freeze


def check_reached(
    subject: Subject, call: ForwardCall, output: Any, fit: Callable[[int, int], bool]
) -> None:
    """See whether samples reach their own rows in ``call``, where a layer took something for
    samples that was not shown to be. If they do, that counts as shown.

    Args:
        subject: the call.
        output: what it returned.
        fit: whether an output may go backward: of so many, the one with this number.

    Raises:
        FlashClippingError: some rows are booked to other samples.
    """
    batch_axes, count = subject.session.batch_axes, subject.samples().count
    reads = [read for read in call.guesses if batch_axes.known(read, any_call=False) is None]
    if not reads or count < 2:
        return
    runs = Runs(subject, subject.samples().tensors)
    norms = runs.norms_of(call, output, fit, count)
    for on in marks_of(count):
        try:
            each = norms(on)
        except FlashClippingError:
            raise
        except MODELS_OWN:
            return  # its graph allows one backward only
        if each is None:
            return
        others = [b for b in range(count) if b not in on]
        if bool((each[:, others].amax(1) > STRAY * each.norm(dim=1)).any()):
            paths = dict.fromkeys(read[0] for read in reads)
            raise FlashClippingError(
                f"{', '.join(paths)}: reached for the first time, and the gradient of some samples "
                "reaches rows that are booked to others. Keep the order of the batch in what these "
                f"layers read, or freeze their parameters.{to_freeze(*paths)}"
            )
    for read in sorted(reads):
        path, of_call, place = read
        calls = batch_axes.reads.setdefault(path, [])
        calls += [[] for _ in range(of_call + 1 - len(calls))]
        if place == len(calls[of_call]):
            calls[of_call].append(call.guesses[read])
