"""What one check is about, and what it has found so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from flash_clipping.diagnostics.batch import Samples, Task
from flash_clipping.diagnostics.watch import Flash


@dataclass
class Subject:
    """A model with a batch and a loss.

    Attributes:
        plain: the model, without dropout; copies of it run.
        samples, task: the batch and the loss.
        sections: names of the equal parts of parameters, by name.
        options: of :class:`~flash_clipping.GradSampleModuleFlashClipping`.
        notes, failures: for the report, in the order in which they were found.
    """

    plain: nn.Module
    samples: Samples
    task: Task
    sections: dict[str, Sequence[str]]
    options: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def wrapped(self) -> Flash:
        """A new wrapped copy of the model."""
        return Flash(self.plain, self.task, self.options, self.sections)


def described(error: BaseException) -> str:
    """What an error says, with its type where it is not this library's own."""
    text = str(error).strip() or repr(error)
    kind = type(error).__name__
    return text if kind == "FlashClippingError" else f"{text} ({kind})"
