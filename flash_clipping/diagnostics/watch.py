"""A model under check, and flash clipping on copies of it.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.root_forward import RootForward
from flash_clipping.diagnostics.oracle import FLOOR, TOLERANCE, Samples, Task, cast
from flash_clipping.diagnostics.report import listed
from flash_clipping.engine.grad_sample_module import GradSampleModuleFlashClipping


@dataclass
class Subject:
    """A model with a batch and a loss.

    Attributes:
        plain: the model, without dropout; copies of it run.
        samples, task: the batch and the loss.
        options: of :class:`~flash_clipping.GradSampleModuleFlashClipping`.
        allowed: relative error, if not that of the dtype.
        dtype: the narrowest that the model computes with; once it has run.
        notes: for the report, in the order in which they were found.
        causes: of failures, in that order, and where each was seen.
    """

    plain: nn.Module
    samples: Samples
    task: Task
    options: dict[str, Any]
    allowed: float | None
    dtype: torch.dtype = torch.float32
    notes: list[str] = field(default_factory=list)
    causes: dict[str, list[str]] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype] if self.allowed is None else self.allowed

    @property
    def floor(self) -> float:
        return FLOOR[self.dtype]

    def fail(self, cause: str, *where: str) -> None:
        self.causes.setdefault(cause, []).extend(where)

    @property
    def failures(self) -> tuple[str, ...]:
        """A text for each cause, which begins with where it was seen."""
        texts = [
            f"{listed(where, most=3)}: {cause}" if where else cause
            for cause, where in self.causes.items()
        ]
        return tuple(text[:1].upper() + text[1:] for text in texts)

    @cached_property
    def exact(self) -> tuple[nn.Module, Samples]:
        """A copy of the model, and the batch, in which the truth is computed: in float64, or in the
        model's own dtype, where code insists on that."""
        model = copy.deepcopy(self.plain)
        try:
            batch = cast(self.samples.all, torch.float64)
            self.task.value(model.double(), batch)
        except Exception as error:
            self.notes.append(
                f"The model or the loss does not run in float64 ({described(error)}); the oracle "
                "ran in the model's own dtype, so rounding is on both sides."
            )
            return copy.deepcopy(self.plain), self.samples
        return model, Samples(batch, self.options["batch_first"], model)


class Flash:
    """The wrapped copy of the model and what its last step left.

    Args:
        proven: whether steps are those of training, and begin with its proof; otherwise they leave
            whatever their gradients are.

    Attributes:
        norms_B: of the last step, in float64, on the CPU.
    """

    def __init__(self, subject: Subject, proven: bool = False):
        self.module = GradSampleModuleFlashClipping(copy.deepcopy(subject.plain), **subject.options)
        self.has_taps = self.module.mode != "one_by_one"
        calls: Any = self.module._session.calls
        if not proven and self.has_taps:  # passes of other classes are for whoever watches them
            calls.backward_pass_class = type("Compared", (calls.backward_pass_class,), {})
        self.task = subject.task
        self.params = dict(self.module._module.named_parameters())
        self.norms_B = torch.empty(0)

    def step(self, batch: Any, max_grad_norm: float = 1.0) -> None:
        """Forward and backward with this bound."""
        self.module.max_grad_norm = max_grad_norm
        self.module.zero_grad(set_to_none=True)
        self.task(self.module, batch).backward()
        self.norms_B = self.module.get_norm_sample().detach().double().cpu()

    def norms_of(self, name: str) -> Tensor:
        """Norms ``[B]`` of one parameter in the last step."""
        norms_PB = self.module.running_step.norms_of([self.params[name]]).norms_PB
        return norms_PB.squeeze(0).detach().double().cpu()

    def rules(self) -> dict[str, str]:
        """The rules of the layers that use each parameter, by its name, or what takes it without:
        ``"bare"`` use by its module, or, without taps, ``"sample by sample"``."""
        names = {param: name for name, param in self.params.items()}
        found: dict[str, list[str]] = {name: [] for name in self.params}
        for tap in self.module._taps.all if self.has_taps else ():
            rule = "bare" if tap.rule is None else type(tap.rule).__name__
            for owner in () if isinstance(tap, RootForward) else tap.owners:
                for param in owner.parameters(recurse=False):
                    found[names[param]].append(rule)
        return {name: " + ".join(rules) or "sample by sample" for name, rules in found.items()}


def described(error: BaseException) -> str:
    """What an error says, with its type where it is not this library's own."""
    text = str(error).strip() or repr(error)
    kind = type(error).__name__
    return text if kind == "FlashClippingError" else f"{text} ({kind})"
