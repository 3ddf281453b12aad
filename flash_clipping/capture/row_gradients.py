"""Whose rows does a sample's gradient reach? A small backward shows it.

Values alone do not show it where rows hold what is the same for all samples: a class token that was
put in front of every frame, and is then taken from the first ``B`` of ``B * frames`` rows, has the
value that it should have, while its gradient goes to the rows of other samples. So, where rows are
to be taken for parts of samples, the model runs on a few samples, and one sample of one output at a
time goes backward. What layers record of the other samples' rows must be 0. Modules that a user
declared (``folded_modules``) are looked at as well.

Shape suffixes: ``B`` samples, ``R`` rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat import checkpoints_replaced
from flash_clipping.capture.inputs import batched_inputs, map_tensors, tensors_in
from flash_clipping.capture.no_trace import PlainCheckpoint, random_state, untouched
from flash_clipping.capture.proxies import ComparesSamples
from flash_clipping.capture.rehearsal import MODELS_OWN, Rehearsals
from flash_clipping.capture.session import ClippingSession
from flash_clipping.factors import Factor
from flash_clipping.finish.backward_pass import BackwardPass
from flash_clipping.finish.session import Readers

#: Samples that the model runs on.
SAMPLES = 3

#: How often at most it runs, with other random numbers: stochastic depth leaves samples out of
#: layers, and in the deepest of them every fourth.
TRIES = 8

#: What of a gradient may be rounding.
ROUNDING = 1e-6

#: Squared norms ``[B]`` of what layers recorded, added up over the rows of each sample.
_Rows = dict[str, Tensor]


@dataclass(frozen=True)
class Reached:
    """What one sample's outputs, run backward, reached of layers.

    Attributes:
        own: layers that recorded something of every sample, and all of it in the sample's own rows.
        strays: layers that recorded something of one sample in rows of others, in finite numbers.
    """

    own: set[str]
    strays: set[str]


def rows_reached(runs: Rehearsals, size: int, sources: list[Tensor], paths: set[str]) -> Reached:
    """Of layers whose rows are taken for parts of samples, those that this is right for.

    An output in which other layers do not tell samples apart (similarities of all pairs) is passed
    over. Nothing is reached where the model does not run, or returns nothing with a row for each
    sample.

    Args:
        runs: rehearsals of the model on a batch of ``size`` samples; what its layers read is known.
        sources: its inputs that hold the samples.
        paths: the layers.

    Raises:
        torch.OutOfMemoryError: a few samples, with what backward needs, do not fit.
    """
    order = [*range(min(size, SAMPLES) - 1), size - 1] if size > 1 else [0, 0]
    found: list[tuple[int, int, _Rows]] = []
    reached = Reached(set(), set())
    for number in range(TRIES):
        try:
            again = list(_backwards(runs, size, order, sources, runs.seed + number))
        except torch.OutOfMemoryError:
            raise
        except MODELS_OWN:
            return Reached(set(), set())
        if number == 1 and _are_equal(found, again):
            break  # nothing is drawn at random
        found += again
        reached = _confined(found, len(order), paths)
        if reached.own | reached.strays >= paths:
            break
    return reached


def _are_equal(some: list[tuple[int, int, _Rows]], others: list[tuple[int, int, _Rows]]) -> bool:
    """Whether two runs have recorded the same numbers."""
    return len(some) == len(others) and all(
        a[:2] == b[:2]
        and a[2].keys() == b[2].keys()
        and all(torch.equal(norms_B, b[2][path]) for path, norms_B in a[2].items())
        for a, b in zip(some, others, strict=True)
    )


def _confined(found: list[tuple[int, int, _Rows]], B: int, paths: set[str]) -> Reached:
    """The same, of (output, sample, what layers recorded of each sample)."""
    telling = {output for output, _, _ in found}
    for output, b, rows in found:
        if any(_strays(norms_B, b) for path, norms_B in rows.items() if path not in paths):
            telling.discard(output)
    reached: dict[str, set[int]] = {path: set() for path in paths}
    strays: set[str] = set()
    unsure: set[str] = set()  # a sample that is not finite shows nothing
    for output, b, rows in found:
        for path in paths & rows.keys() if output in telling else ():
            if _strays(rows[path], b):
                (strays if rows[path].isfinite().all() else unsure).add(path)
            elif rows[path].any():
                reached[path].add(b)
    own = {path for path, samples in reached.items() if len(samples) == B} - strays - unsure
    return Reached(own, strays)


def _strays(norms_B: Tensor, b: int) -> bool:
    """Whether sample ``b`` reached rows of others, or that cannot be told of numbers that are not
    finite."""
    outside_B = torch.cat([norms_B[:b], norms_B[b + 1 :]])
    return not bool((outside_B <= ROUNDING**2 * norms_B[b]).all())


def _backwards(
    runs: Rehearsals, size: int, order: list[int], sources: list[Tensor], seed: int
) -> Iterator[tuple[int, int, _Rows]]:
    """The model on the samples in ``order``; each of its outputs, sample by sample, backward."""
    session = runs.session
    ids = {id(x) for x in sources}
    args, kwargs = map_tensors(
        lambda x: runs.reordered(size, order, x) if id(x) in ids else x, (runs.args, runs.kwargs)
    )
    tensors = batched_inputs(args, kwargs)
    before = session.current_forward
    call = session.begin_forward(tensors)
    devices = {x.device for x in (*tensors, *session.state()) if x.is_cuda}
    params = session.trainable()
    try:
        with (
            untouched(runs.root),
            random_state(list(devices), seed),
            checkpoints_replaced(PlainCheckpoint),
            _noted(session, len(order)) as rows,
        ):
            outputs = tensors_in(runs.forward(*args, **kwargs))
            call.end()
            call.spent = True  # no backward of the user's may find it
            outputs = [x for x in outputs if _has_samples(x, session.batch_axis, len(order))]
            for number, output in enumerate(outputs):
                for b in range(len(order)):
                    row = output.select(session.batch_axis, b).flatten()
                    weights = torch.arange(1.0, row.numel() + 1, device=row.device).cos()
                    rows.clear()
                    try:
                        torch.autograd.grad(
                            row, params, weights.to(row.dtype), retain_graph=True, allow_unused=True
                        )
                    except ComparesSamples:
                        break  # it tells nothing
                    yield number, b, dict(rows)
    finally:
        call.spent = True
        call.end()
        if before is not None:
            session.resume_forward(before)


def _has_samples(x: Tensor, axis: int, B: int) -> bool:
    return x.is_floating_point() and x.requires_grad and x.dim() > axis and x.shape[axis] == B


@contextmanager
def _noted(session: ClippingSession, B: int) -> Iterator[_Rows]:
    """Let backward passes note squared norms of the rows that layers record, and nothing else."""
    noted: _Rows = {}

    class NotesRows(BackwardPass):
        def record(
            self,
            path: str,
            params: Sequence[nn.Parameter],
            factors: Sequence[Factor],
            readers: Readers | None = None,
        ) -> None:
            with torch.no_grad():
                for factor in factors:
                    rows_R = factor.sqnorms("torch").detach()
                    if len(rows_R) % B:  # no multiple of the samples: not one sample's, surely
                        rows_R = rows_R.new_ones(B)
                    norms_B = rows_R.view(B, -1).sum(1)
                    noted[path] = noted[path] + norms_B if path in noted else norms_B

    kind: Any = session.backward_pass_class
    session.backward_pass_class, session.keeps_rows = NotesRows, True
    try:
        yield noted
    finally:
        session.backward_pass_class, session.keeps_rows = kind, False
