"""What tests of ``flash-clipping check`` share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_clipping.diagnostics import CheckReport


def of(report: CheckReport, name: str):
    return next(parameter for parameter in report.parameters if parameter.name == name)


def statuses(report: CheckReport) -> dict[str, str]:
    return {parameter.name: parameter.status for parameter in report.parameters}


class QKV(nn.Linear):
    """A fused projection whose class has a rule of its own in the tests below."""


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = QKV(4, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.qkv(x)))


class Windows(nn.Module):
    """Folds windows of 2 positions into the batch axis."""

    def __init__(self, together: bool = True):
        super().__init__()
        self.together = together
        self.window, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x_BTd: Tensor) -> Tensor:
        B = x_BTd.shape[0]
        windows = x_BTd.unflatten(1, (-1, 2))
        if self.together:
            folded = self.window(windows.flatten(0, 1)).unflatten(0, (B, -1))
        else:  # all first windows, then all second ones
            rows = self.window(windows.transpose(0, 1).flatten(0, 1))
            folded = rows.unflatten(0, (-1, B)).transpose(0, 1)
        return self.head(torch.tanh(folded.flatten(1, 2)))
