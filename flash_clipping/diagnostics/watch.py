"""Flash clipping on a copy of the model, and which rule served each parameter."""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.two_pass import TwoWalks
from flash_clipping.diagnostics.oracle import TOLERANCE, Samples, Task, cast
from flash_clipping.engine.grad_sample_module import GradSampleModuleFlashClipping
from flash_clipping.factors import PerSampleGrad
from flash_clipping.finish.backward_pass import BackwardPass, Readers, Session


@dataclass
class Subject:
    """A model with a batch and a loss.

    Attributes:
        plain: the model, without dropout; copies of it run.
        samples, task: the batch and the loss.
        options: of :class:`~flash_clipping.GradSampleModuleFlashClipping`.
        notes, failures: for the report, in the order in which they were found.
    """

    plain: nn.Module
    samples: Samples
    task: Task
    options: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @cached_property
    def oracle_dtype(self) -> torch.dtype | None:
        """That in which the truth is computed: float64, or ``None``, the model's own, where code
        insists on that."""
        try:
            model = copy.deepcopy(self.plain).double()
            self.task.value(model, cast(self.samples.all, torch.float64))
        except Exception as error:
            self.notes.append(
                f"The model or the loss does not run in float64 ({described(error)}); the oracle "
                "ran in the model's own dtype, so rounding is on both sides."
            )
            return None
        return torch.float64

    def exact(self) -> tuple[nn.Module, Samples]:
        """A copy of the model, and the batch, in which the truth is computed."""
        model = copy.deepcopy(self.plain)
        if self.oracle_dtype is None:
            return model, self.samples
        batch = cast(self.samples.all, self.oracle_dtype)
        return model.to(self.oracle_dtype), Samples(batch, self.batch_first, model)

    @property
    def batch_first(self) -> bool:
        return bool(self.options["batch_first"])


@dataclass
class _Seen:
    """How one parameter was served: names, in the order in which they came."""

    rules: dict[str, None] = field(default_factory=dict)
    factors: dict[str, None] = field(default_factory=dict)


class Flash:
    """The wrapped copy of the model and what its last step left.

    Args:
        watched: note what serves each parameter, and compare whatever the gradients are; otherwise
            steps are those of training, and begin with its proof.
    """

    def __init__(self, subject: Subject, watched: bool = True):
        self.module = GradSampleModuleFlashClipping(copy.deepcopy(subject.plain), **subject.options)
        if watched:
            session = self.module._session
            session.calls.backward_pass_class = partial(
                _WatchedTwoWalks if self.module.mode == "two_pass" else _WatchedBackwardPass,
                flash=self,
            )
        self.task = subject.task
        self.params = dict(self.module._module.named_parameters())
        self.names = {param: name for name, param in self.params.items()}
        self.taps = {tap.path: tap for tap in self.module._taps.all}
        self.seen: dict[str, _Seen] = {}
        self.dtype = narrowest(param.dtype for param in self.params.values())
        self.loss = math.nan
        self.bound = 1.0
        self.norms: tuple[float, ...] = ()

    def step(self, batch: Any, max_grad_norm: float | None) -> None:
        """Forward and backward; without a bound, once more with the median norm as bound."""
        self._step(batch, 1.0 if max_grad_norm is None else max_grad_norm)
        if max_grad_norm is None:
            found = [norm for norm in self.norms if 0 < norm < math.inf]
            self._step(batch, statistics.median(found) if found else 1.0)

    def _step(self, batch: Any, max_grad_norm: float) -> None:
        self.bound = self.module.max_grad_norm = max_grad_norm
        self.module.zero_grad(set_to_none=True)
        self.seen.clear()
        loss = self.task(self.module, batch)
        loss.backward()
        self.loss = float(loss.detach())
        self.norms = floats(self.module.get_norm_sample())

    def grad(self, name: str) -> Tensor:
        grad = self.params[name].grad
        return torch.zeros_like(self.params[name]) if grad is None else grad.detach()

    def note(self, path: str, param: nn.Parameter, factor: PerSampleGrad) -> None:
        """What a backward pass recorded of a parameter, of the layer at this path."""
        tap = self.taps.get(path)
        if tap is not None and tap.rule is not None:
            rule = type(tap.rule).__name__
        else:
            rule = "sample by sample" if getattr(tap, "loops", False) else "bare"
        seen = self.seen.setdefault(self.names[param], _Seen())
        seen.rules[rule] = None
        seen.factors[type(factor).__name__] = None
        operands = [x.dtype for x in tensors_in(factor) if x.is_floating_point()]
        self.dtype = narrowest([self.dtype, *operands])


class _WatchedBackwardPass(BackwardPass):
    """Tells what is recorded."""

    def __init__(self, session: Session, flash: Flash):
        super().__init__(session)
        self._flash = flash

    def record(
        self,
        path: str,
        params: Sequence[nn.Parameter],
        factors: Sequence[PerSampleGrad],
        readers: Readers | None = None,
    ) -> None:
        super().record(path, params, factors, readers)
        for param, factor in zip(params, factors, strict=True):
            self._flash.note(path, param, factor)


class _WatchedTwoWalks(_WatchedBackwardPass, TwoWalks):
    """Tells what is recorded in the first walk."""


@contextmanager
def fallbacks(notes: list[str]) -> Iterator[None]:
    """Turn warnings about slow paths into notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = str(warning.message)
        if "flash_clipping" not in text and "clipping coefficient" not in text:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        elif text not in notes:
            notes.append(text)


def narrowest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    known = [dtype for dtype in dtypes if dtype in TOLERANCE]
    return max(known, key=TOLERANCE.__getitem__, default=torch.float32)


def floats(norms: Tensor) -> tuple[float, ...]:
    return tuple(norms.detach().double().cpu().tolist())


def described(error: BaseException) -> str:
    """What an error says, with its type where it is not this library's own."""
    text = str(error).strip() or repr(error)
    kind = type(error).__name__
    return text if kind == "FlashClippingError" else f"{text} ({kind})"
