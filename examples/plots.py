"""How a private run went, in one picture: loss, ε, norms of gradients, and what was clipped.

Only ε and what follows from the trained weights may be published. Losses of training data, norms
and shares are for whoever trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Points = Sequence[tuple[int, float]]  # (step, value)


@dataclass
class Curves:
    """What is drawn. A list without points leaves its place empty."""

    title: str
    metric_name: str
    bound: float  # C, to which samples are clipped
    loss: Points = ()
    metric: Points = ()
    epsilon: Points = ()
    median_norm: Points = ()
    clipped_share: Points = ()


def draw(curves: Curves, path: Path) -> None:
    """Write four plots over steps as one file, ``.svg`` or ``.png``; the same from the same points.

    Args:
        curves: what is drawn.
        path: its folder is made where it does not exist.
    """
    import matplotlib

    matplotlib.use("Agg")
    # Letters as text, which is shorter than their outlines.
    settings = {"svg.hashsalt": "flash", "svg.fonttype": "none"}
    with matplotlib.rc_context(settings):
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(2, 2, figsize=(8, 5), sharex=True, layout="constrained")
        figure.suptitle(curves.title, fontsize="medium")
        (loss, epsilon), (norm, share) = axes
        _line(loss, curves.loss, "training loss", "tab:blue", marker="")
        metric = loss.twinx()
        _line(metric, curves.metric, curves.metric_name, "tab:green")
        _line(epsilon, curves.epsilon, "ε", "tab:red", ylim=(0, None))
        _line(norm, curves.median_norm, "median gradient norm", "tab:purple", ylim=(0, None))
        if curves.median_norm:
            norm.axhline(curves.bound, color="gray", linestyle="--", label="bound C")
            norm.legend()
        _line(share, curves.clipped_share, "share of clipped samples", "tab:orange", ylim=(0, 1.04))
        for place in (norm, share):
            place.set(xlabel="step")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def _line(
    place: Any, points: Points, name: str, color: str, marker: str = ".", **limits: Any
) -> None:
    if points:
        place.plot(*zip(*points, strict=True), color=color, marker=marker, linewidth=1)
    place.set(ylabel=name, **limits)
    place.yaxis.label.set_color(color)
