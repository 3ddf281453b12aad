"""Noise that is correlated over steps (:mod:`flash_clipping.noise.mechanisms`), for any of the
optimizers: of one process, of shards, of a stage, of data parallelism.

Noise is made in fp32 (float64 for float64 sums), step by step: independent noise ``z_t`` comes from
the stream, and what is added is row ``t`` of ``inv(C) Z``. Every element's row is made of that
element's noise alone, so that each process makes the rows of its own shards, of what it draws for
them: nothing is sent, and replicas, which draw the same, keep the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.errors import FlashClippingError
from flash_clipping.noise.mechanisms import (
    BandedInverseNoise,
    BandedNoise,
    BufferedNoise,
    NoiseMechanism,
)
from flash_clipping.ops.noise import noisy_means
from flash_clipping.randomness import ALL_ROUNDS, Draw, Purpose, SecretStream


class CorrelatedNoise:
    """Rows of ``inv(C) Z``, one after the other; the sums have the same shapes in all steps.

    Noise multiplier, bound and trainable parameters stay as they are in the first step, or a step
    is refused: what is taken back must be what was added.

    Args:
        mechanism: how noise is correlated.
        before_noise: called before a step's noise is drawn, with the step's batch; raises if the
            step may not be taken.
    """

    def __init__(
        self, mechanism: NoiseMechanism, before_noise: Callable[[DrawnBatch | None], None]
    ):
        self.mechanism, self._before_noise = mechanism, before_noise
        self.begin_run()

    def begin_run(self) -> None:
        """Steps from now on take nothing back of the noise of those before."""
        #: Of banded noise the last rows of ``inv(C) Z``, the latest first; of buffered noise the
        #: buffers.
        self._rows: list[list[Tensor]] = []
        #: Where ``z`` came from: of banded noise that is drawn again, in every step, in order; of
        #: noise with a banded inverse, in those that the next one takes back, the latest first.
        self._draws: list[Draw] = []
        self._shapes: Any = None
        #: Noise multiplier and standard deviation of the steps before.
        self._settings: tuple[float, float] | None = None

    def noisy_means(
        self,
        sums: Sequence[Tensor],
        std: float,
        divisor: float,
        *,
        batch: DrawnBatch | None,
        multiplier: float,
        stream: SecretStream,
        rounds: int,
        shards: Sequence[int] | None,
        dtypes: Sequence[torch.dtype],
    ) -> list[Tensor]:
        """As :func:`flash_clipping.ops.noise.noisy_means`, with the next row of noise, of words of
        ``stream`` by so many ``rounds``. ``FlashClippingError``, before anything is drawn, if the
        step may not be taken: by its ``batch``, by another ``multiplier``, with which steps are
        accounted for, or ``std`` than before, or by its parameters."""
        self._before_noise(batch)
        if self._settings not in (None, (multiplier, std)):
            raise FlashClippingError(
                "FC522 optimizer.step(): found noise multiplier and standard deviation "
                f"{(multiplier, std)}, and {self._settings} in the steps before, of which this one "
                "takes back a part. Leave noise_multiplier and max_grad_norm as they are while "
                "noise is correlated."
            )
        rows = self.next(sums, stream, shards, rounds)
        self._settings = multiplier, std
        noisy = []
        for summed, row, dtype in zip(sums, rows, dtypes, strict=True):
            mean = torch.add(summed.to(row.dtype), row, alpha=std).div_(divisor)
            noisy.append(mean.to(dtype))
        return noisy

    def next(
        self,
        sums: Sequence[Tensor],
        stream: SecretStream,
        shards: Sequence[int] | None = None,
        rounds: int = ALL_ROUNDS,
    ) -> list[Tensor]:
        """Noise of unit scale for these sums of all trainable parameters, or this process's
        ``shards`` of them, by number: of their shapes and devices, fp32 or float64."""
        shapes = [(tuple(s.shape), s.dtype, s.device) for s in sums]
        if self._shapes not in (None, shapes):
            raise FlashClippingError(
                "FC523 optimizer.step(): found other trainable parameters than in the steps "
                "before, with noise that is correlated over steps. Train all of them from the "
                "first step to the last, or begin a new run."
            )
        self._shapes = shapes
        draw = stream.draw(Purpose.NOISE, rounds)
        numbers = [*enumerate([0] * len(sums) if shards is None else shards)]
        if isinstance(self.mechanism, BandedNoise) and self.mechanism.memory == "drawn_again":
            draws = [*self._draws, draw]
            row = []
            for number, summed in zip(numbers, sums, strict=True):
                rows: list[list[Tensor]] = []
                for before in draws:  # the same arithmetic as that of rows which are kept
                    rows = self._with_next(_normals(before, [summed], [number]), rows)
                row.append(rows[0][0])
            self._draws = draws  # a step that failed has taken nothing
            return row
        row = _normals(draw, sums, numbers)
        if isinstance(self.mechanism, BandedInverseNoise):
            for share, drawn in zip(self.mechanism.taken_back, self._draws, strict=False):
                for w, z in zip(row, _normals(drawn, sums, numbers), strict=True):
                    w.sub_(z, alpha=float(share))
            self._draws = [draw, *self._draws[: self.mechanism.count - 2]]
        elif isinstance(self.mechanism, BandedNoise):
            self._rows = self._with_next(row, self._rows)
        elif isinstance(self.mechanism, BufferedNoise):
            self._buffer(self.mechanism, row)
        return row

    def _buffer(self, mechanism: BufferedNoise, z: list[Tensor]) -> None:
        """Take from ``z`` what the buffers say; it becomes a row, and is added to them."""
        if not self._rows:
            self._rows = [[x.clone() for x in z] for _ in mechanism.weights]
            return
        for weight, buffer in zip(mechanism.weights, self._rows, strict=True):
            for w, s in zip(z, buffer, strict=True):
                w.sub_(s, alpha=weight)
        for decay, buffer in zip(mechanism.decays, self._rows, strict=True):
            for w, s in zip(z, buffer, strict=True):
                s.mul_(decay).add_(w)

    def _with_next(self, z: list[Tensor], rows: list[list[Tensor]]) -> list[list[Tensor]]:
        """The last rows of banded noise, the latest first, when ``z`` is drawn; it becomes one."""
        assert isinstance(self.mechanism, BandedNoise)
        for c, before in zip(self.mechanism.coefficients[1:], rows, strict=False):
            for w, w_before in zip(z, before, strict=True):
                w.sub_(w_before, alpha=float(c))
        return [z, *rows[: self.mechanism.count - 2]]

    def __getstate__(self) -> Any:
        raise FlashClippingError(
            "FC537 A copy or pickle of correlated noise would take back the same noise twice. Save "
            "model, optimizer.state_dict() and engine; a resumed run begins a new row of steps, "
            "which the accountant counts separately."
        )


def _normals(
    draw: Draw, sums: Sequence[Tensor], numbers: Sequence[tuple[int, int]]
) -> list[Tensor]:
    """The normals of a draw, of unit scale: the same whenever they are asked for. ``numbers``:
    parameter and shard of each sum."""
    nothing = [torch.zeros_like(s, dtype=torch.promote_types(s.dtype, torch.float32)) for s in sums]
    tensors, shards = zip(*numbers, strict=True) if numbers else ((), ())
    return noisy_means(nothing, 1.0, 1.0, draw=draw, tensors=tensors, shards=shards)
