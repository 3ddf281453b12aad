"""Flash clipping on a copy of the model, and which rule and algorithm served each parameter."""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.diagnostics.batch import Samples, Task
from flash_clipping.diagnostics.oracle import TOLERANCE
from flash_clipping.diagnostics.sections import section_axis
from flash_clipping.engine.grad_sample_module import GradSampleModuleFlashClipping
from flash_clipping.factors import Convolution, Dense, Factor, Lookup, Outer, RowSum, TiedEmbedding
from flash_clipping.finish.backward_pass import BackwardPass
from flash_clipping.finish.session import Readers
from flash_clipping.ops.runtime import backend as backends, cost


@dataclass
class _Seen:
    """How one parameter was served."""

    rule: str
    algorithms: list[str] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)
    dense: Tensor | None = None


class Flash:
    """The wrapped copy of the model and what its last step left."""

    def __init__(
        self,
        plain: nn.Module,
        task: Task,
        options: dict[str, Any],
        sections: Mapping[str, Sequence[str]],
    ):
        self.module = GradSampleModuleFlashClipping(copy.deepcopy(plain), **options)
        self.task = task
        self.sections = sections
        self.params = dict(self.module._module.named_parameters())
        self.names = {param: name for name, param in self.params.items()}
        self.taps = {tap.path: tap for tap in self.module._taps.all}
        self.seen: dict[str, _Seen] = {}
        self.dtype = narrowest(param.dtype for param in self.params.values())
        self.loss = math.nan
        self.bound = 1.0

    def step(self, batch: Any, max_grad_norm: float | None) -> None:
        """Forward and backward; without a bound, once more with the median norm as bound."""
        self.bound = 1.0 if max_grad_norm is None else max_grad_norm
        self._backward(batch)
        if max_grad_norm is None:
            found = [norm for norm in floats(self.norms) if 0 < norm < math.inf]
            self.bound = statistics.median(found) if found else 1.0
            self._backward(batch)

    def _backward(self, batch: Any) -> None:
        self.module.max_grad_norm = self.bound
        self.module.zero_grad(set_to_none=True)
        self.seen.clear()
        with _watched(self):
            loss = self.task(self.module, batch)
            loss.backward()
        self.loss = float(loss.detach())
        self.norms = self.module.get_norm_sample()

    def norms_of(self, name: str) -> Tensor:
        norms: Tensor = getattr(self.params[name], "_norm_sample")  # noqa: B009
        return norms

    def grad(self, name: str) -> Tensor:
        grad = self.params[name].grad
        return torch.zeros_like(self.params[name]) if grad is None else grad.detach()

    def section_norms(self, name: str) -> list[tuple[float, ...]]:
        parts = len(self.sections[name])
        seen = self.seen.get(name)
        if seen is None or seen.dense is None:
            return [(0.0,) * len(self.norms)] * parts
        axis = 1 + section_axis(self.module._module, name)
        return [
            floats(torch.linalg.vector_norm(chunk.double().flatten(1), dim=1))
            for chunk in seen.dense.chunk(parts, axis)
        ]

    # -- called by the backward pass -----------------------------------------------------------

    def recorded(self, path: str, param: nn.Parameter, given: Factor, stored: bool) -> None:
        name = self.names[param]
        tap = self.taps.get(path)
        algorithm = "outer_store" if stored else _algorithm(given)
        if tap is not None and tap.rule is not None:
            rule = type(tap.rule).__name__
        elif tap is not None and not getattr(tap, "generic", True):
            rule = "bare"
        else:
            rule = "generic, sample by sample" if getattr(tap, "loops", False) else "generic"
            algorithm = "generic"
        seen = self.seen.setdefault(name, _Seen(rule))
        if rule not in seen.rule.split(" + "):
            seen.rule += f" + {rule}"
        self._note(seen, algorithm, given)
        operands = [t for t in _tensors_of(given) if t.is_floating_point()]
        self.dtype = narrowest([self.dtype, *(t.dtype for t in operands)])
        if name in self.sections:
            dense = given.dense().detach().view(-1, *param.shape)
            scale = len(dense) if self.task.reduction == "mean" else 1
            seen.dense = dense * scale + (0 if seen.dense is None else seen.dense)

    def merged(self, factors: Mapping[int, Factor], params: Mapping[int, nn.Parameter]) -> None:
        """All uses are in: linear maps that read one input share the work, which may decide."""
        readers = Counter(
            factor.shares_input_with() for factor in factors.values() if isinstance(factor, Outer)
        )
        # One that is frozen by now is refused when norms are taken.
        factors = {key: factor for key, factor in factors.items() if key in params}
        for key, factor in factors.items():
            if isinstance(factor, Outer | TiedEmbedding):
                seen = self.seen[self.names[params[key]]]
                seen.algorithms, seen.backends = [], []
                shared = 1
                if isinstance(factor, Outer):
                    shared = readers[factor.shares_input_with()]
                self._note(seen, _algorithm(factor, shared=shared), factor)

    def _note(self, seen: _Seen, algorithm: str, factor: Factor) -> None:
        backend = _backend(algorithm, factor, self.module.backend)
        if algorithm not in seen.algorithms:
            seen.algorithms.append(algorithm)
        if backend not in seen.backends:
            seen.backends.append(backend)


@contextmanager
def _watched(flash: Flash) -> Iterator[None]:
    """Let the backward passes of this model tell ``flash`` what is recorded."""

    class WatchedBackwardPass(BackwardPass):
        def record(
            self,
            path: str,
            params: Sequence[nn.Parameter],
            factors: Sequence[Factor],
            readers: Readers | None = None,
        ) -> None:
            first_pass = self.coef is None
            super().record(path, params, factors, readers)
            if not first_pass:
                return
            first = len(self.factors) - len(factors)
            kept = factors if self.norms_only else self.factors[first:]
            with torch.no_grad():
                for param, factor, as_kept in zip(params, factors, kept, strict=True):
                    formed = isinstance(factor, Outer | Convolution) and as_kept is not factor
                    flash.recorded(path, param, factor, stored=formed)

        def merged(self, keys: Sequence[int]) -> dict[int, Factor]:
            factors = super().merged(keys)
            flash.merged(factors, self.params)
            return factors

    session = flash.module._session

    before, session.backward_pass_class = session.backward_pass_class, WatchedBackwardPass
    try:
        yield
    finally:
        session.backward_pass_class = before


@contextmanager
def fallbacks(notes: list[str]) -> Iterator[None]:
    """Turn warnings about slow paths into notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = str(warning.message)
        if "flash_clipping" in text or "clipping coefficient" in text:
            if text not in notes:
                notes.append(text)
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


_KINDS: dict[type[Factor], str] = {
    Dense: "vector",
    RowSum: "vector",
    Lookup: "lookup",
    Convolution: "convolution",
    TiedEmbedding: "tied",
}

# The operation whose kernel decides what to print as backend; the others are PyTorch alone.
_OPERATIONS = {
    "gram": "gram_blocks",
    "outer": "outer_sqnorms",
    "outer_store": "outer_sqnorms",
    "lookup": "embedding_sqnorms",
    "tied": "embedding_sqnorms",
}


def _algorithm(factor: Factor, shared: int = 1) -> str:
    """What will compute this factor's norms."""
    if isinstance(factor, Outer):
        B, T, d = factor.A_BTd.shape
        itemsize = factor.A_BTd.element_size()
        p, device_type = factor.G_BTp.shape[-1], factor.A_BTd.device.type
        return cost.choose_on(device_type, B, T, d, p, itemsize, may_store=False, shared=shared)
    parts = getattr(factor, "parts", None)
    if parts:
        return " + ".join(dict.fromkeys(_algorithm(part) for part in parts))
    return _KINDS.get(type(factor), type(factor).__name__.lower())


def _backend(algorithm: str, factor: Factor, asked: str) -> str:
    """Which implementation that algorithm runs on, as far as is known before a kernel fails."""
    operands = [t for t in _tensors_of(factor) if t.is_floating_point()]
    operation = _OPERATIONS.get(algorithm.partition(" + ")[0])
    if operation is None or not operands or not operands[0].numel():
        if algorithm != "convolution":
            return "torch"
        operation = "outer_sqnorms"
    broken = {name for name, dtype in backends._broken if dtype == operands[0].dtype}
    # Kernels for many layers at once are named after those for one.
    if backends._import_error() or any(name.startswith(operation) for name in broken):
        return "torch"
    return backends.resolve(asked, operands[0])


def _tensors_of(factor: Factor) -> list[Tensor]:
    found: list[Tensor] = []
    for value in vars(factor).values():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, Factor):
            found += _tensors_of(value)
        elif isinstance(value, (list, tuple)):
            found += [t for part in value if isinstance(part, Factor) for t in _tensors_of(part)]
    return found


def narrowest(dtypes: Any) -> torch.dtype:
    known = [dtype for dtype in dtypes if dtype in TOLERANCE]
    return max(known, key=TOLERANCE.__getitem__, default=torch.float32)


def floats(norms: Tensor) -> tuple[float, ...]:
    return tuple(norms.detach().double().cpu().tolist())


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
