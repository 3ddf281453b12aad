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
