"""Noise that is correlated over steps (:mod:`flash_clipping.noise.mechanisms`), for any of the
optimizers: of one process, of shards, of a stage, of data parallelism.

Noise is made in fp32 (float64 for float64 sums), step by step: independent noise ``z_t`` comes from
the stream, and what is added is row ``t`` of ``inv(C) Z``. Every element's row is made of that
element's noise alone, so that each process makes the rows of its own shards, of what it draws for
them: nothing is sent, and replicas, which draw the same, keep the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.errors import FlashClippingError
from flash_clipping.noise.mechanisms import BufferedNoise, NoiseMechanism
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
        #: What the mechanism keeps: the last rows of ``inv(C) Z``, the latest first, or buffers.
        self._rows: list[list[Tensor]] = []
        #: Where the noise came from that the next step takes back, the latest first.
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
        mechanism = self.mechanism
        draws = [stream.draw(Purpose.NOISE, rounds), *self._draws]
        numbers = [*enumerate([0] * len(sums) if shards is None else shards)]
        row = _normals(draws[0], sums, numbers)
        _less(row, mechanism.taken_back, (_normals(draw, sums, numbers) for draw in self._draws))
        self._draws = draws[: len(mechanism.taken_back)]
        if not isinstance(mechanism, BufferedNoise):
            _less(row, mechanism.kept, self._rows)
            self._rows = [row, *self._rows][: len(mechanism.kept)]
            return row
        self._rows = self._rows or [[*map(torch.zeros_like, row)] for _ in mechanism.kept]
        _less(row, mechanism.kept, self._rows)
        for decay, buffer in zip(mechanism.decays, self._rows, strict=True):
            for w, s in zip(row, buffer, strict=True):
                s.mul_(decay).add_(w)
        return row

    def __getstate__(self) -> Any:
        raise FlashClippingError(
            "FC537 A copy or pickle of correlated noise would take back the same noise twice. Save "
            "model, optimizer.state_dict() and engine; a resumed run begins a new row of steps, "
            "which the accountant counts separately."
        )


def _less(z: list[Tensor], shares: Iterable[float], before: Iterable[Sequence[Tensor]]) -> None:
    """Take these shares of what was added, or drawn, before from ``z``; at first there is none."""
    for share, row in zip(shares, before, strict=False):
        for w, of_row in zip(z, row, strict=True):
            w.sub_(of_row, alpha=float(share))


def _normals(
    draw: Draw, sums: Sequence[Tensor], numbers: Sequence[tuple[int, int]]
) -> list[Tensor]:
    """The normals of a draw, of unit scale: the same whenever they are asked for. ``numbers``:
    parameter and shard of each sum."""
    nothing = [torch.zeros_like(s, dtype=torch.promote_types(s.dtype, torch.float32)) for s in sums]
    tensors, shards = zip(*numbers, strict=True) if numbers else ((), ())
    return noisy_means(nothing, 1.0, 1.0, draw=draw, tensors=tensors, shards=shards)
