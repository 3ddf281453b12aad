"""A line while training: ε, the share of clipped samples, the median norm, samples per second.

Numbers are gathered on the device and read once in many steps. But for ε they are functions of
private samples without noise: for the person who trains, not for publication.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from flash_clipping.engine.privacy_engine import FlashPrivacyEngine
from flash_clipping.errors import checked_number
from flash_clipping.randomness.stream import seed_notice


@dataclass(frozen=True)
class Reading:
    """Statistics of the samples since the last reading.

    Attributes:
        samples: how many there were.
        clipped_share: of these, the share whose gradient was scaled down (or left out, as one that
            is not finite); NaN without samples.
        median_norm: the median of their gradients' norms, before clipping; NaN without samples.
        seconds: since the last reading.
    """

    samples: int
    clipped_share: float
    median_norm: float
    seconds: float

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds > 0 else math.nan

    def logs(self, epsilon: float) -> dict[str, float]:
        """The numbers that trainers log, with ε. Logs are published with weights, so they have
        nothing of the samples' gradients."""
        return {"epsilon": epsilon, "samples_per_second": self.samples_per_second}

    def shown(self) -> dict[str, float]:
        """The numbers that are functions of the samples' gradients."""
        return {"clipped_share": self.clipped_share, "median_norm": self.median_norm}


class ClippingStatistics:
    """Gathers norms and clipping coefficients of backward passes of ``model`` (what
    ``make_private`` returned), without waiting for the device."""

    def __init__(self, model: GradSampleHooksFlashClipping):
        self._model = model
        #: By backward passes: norms, whether samples were clipped, and whether they are padding.
        self._passes: list[tuple[Tensor, Tensor, Tensor]] = []
        self._began = time.perf_counter()

    def note_backward(self) -> None:
        """Take the samples of the last backward pass; before the optimizer's step."""
        norm_B, coef = self._model.get_norm_sample(), self._model.get_clipping_coef()
        coef_PB = coef if coef.dim() == 2 else coef.unsqueeze(0)
        # No sample has norm and coefficient 0; padding is looked for when statistics are read.
        is_padding_B = (coef_PB[0] == 0) & (norm_B == 0)
        self._passes.append((norm_B.detach(), (coef_PB < 1).any(0), is_padding_B))

    def restart(self) -> None:
        """Do not count the time until now in the next reading."""
        self._began = time.perf_counter()

    def read(self) -> Reading:
        """All samples since the last reading; waits for the device."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        samples, share, median = 0, math.nan, math.nan
        if self._passes:
            norms, clipped, is_padding = map(torch.cat, zip(*self._passes, strict=True))
            counts = (~is_padding).nonzero().flatten()
            norms, clipped, samples = norms[counts], clipped[counts], len(counts)
        if samples:
            shares = clipped.to(norms.dtype).mean()
            share, median = torch.stack([shares, norms.median()]).tolist()
        self._passes = []
        return Reading(samples, share, median, seconds)


class PrivacyDashboard:
    """Prints a line every so many steps; the first says which datasets ε compares::

        step 100   ε = 1.83   clipped 62%   median norm 0.741   5,210 samples/s

    Example::

        with PrivacyDashboard(engine, model, delta=1e-5, every=50) as dashboard:
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                dashboard.update()
                optimizer.step()

    Args:
        engine: accounts for the steps.
        model: what its ``make_private`` returned: the wrapped model, or its hooks.
        delta: of the ε that is shown.
        every: steps from one line to the next.
        show: takes the line.

    Guarantees:
        Between two lines :meth:`update` does not wait for the device.
    """

    def __init__(
        self,
        engine: FlashPrivacyEngine,
        model: GradSampleHooksFlashClipping,
        *,
        delta: float,
        every: int = 50,
        show: Callable[[str], object] = print,
    ):
        checked_number("every", every, "[1, inf)", example=50, whole=True)
        self._engine, self._delta, self._every, self._show = engine, delta, every, show
        self._model, self._statistics = model, ClippingStatistics(model)
        self._shown = len(engine.accountant)
        self._values: dict[str, float] = {}

    def __enter__(self) -> PrivacyDashboard:
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._engine.accountant) > self._shown:
            self._line()

    def update(self) -> None:
        """Between ``backward()`` and ``optimizer.step()``; for every part of a logical batch."""
        if len(self._engine.accountant) - self._shown >= self._every:
            self._line()
        self._statistics.note_backward()

    def values(self) -> dict[str, float]:
        """The numbers of the last line: ``step``, ``epsilon``, ``clipped_share``, ``median_norm``,
        ``samples_per_second``. Empty before the first line. For a logger::

            PrivacyDashboard(engine, model, delta=1e-5, show=lambda _: log(dashboard.values()))
        """
        return dict(self._values)

    def _line(self) -> None:
        self._shown = len(self._engine.accountant)
        reading = self._statistics.read()
        epsilon = self._engine.get_epsilon(self._delta)
        shown = line(self._shown, epsilon, reading)
        if not self._values:
            shown += f"   (ε: {self._engine.relation})"
        self._values = {"step": self._shown} | reading.logs(epsilon) | reading.shown()
        self._statistics.restart()  # the time that ε takes is not the training's
        self._show(shown + seed_notice(self._engine.stream))


def line(step: int, epsilon: float, reading: Reading) -> str:
    """One line of the dashboard."""
    return (
        f"step {step}   ε = {epsilon:.2f}   clipped {reading.clipped_share:.0%}   "
        f"median norm {reading.median_norm:.3g}   {reading.samples_per_second:,.0f} samples/s"
    )
