"""Flash clipping on a copy of the model, and which rule and algorithm served each parameter."""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.inputs import tensors_in
from flash_clipping.diagnostics.oracle import TOLERANCE, Samples, Task, cast
from flash_clipping.engine.grad_sample_module import GradSampleModuleFlashClipping
from flash_clipping.factors import (
    ConvolutionGrad,
    DenseGrad,
    EmbeddingGrad,
    LinearGrad,
    PerSampleGrad,
    SumGrad,
    TiedEmbeddingGrad,
)
from flash_clipping.finish.backward_pass import BackwardPass, Readers, Session
from flash_clipping.ops.runtime import backend as backends, cost


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
    algorithms: dict[str, None] = field(default_factory=dict)
    backends: dict[str, None] = field(default_factory=dict)


class Flash:
    """The wrapped copy of the model and what its last step left.

    Args:
        watched: note what serves each parameter, and compare whatever the gradients are; otherwise
            steps are those of training, and begin with its proof.
    """

    def __init__(self, subject: Subject, watched: bool = True):
        self.module = GradSampleModuleFlashClipping(copy.deepcopy(subject.plain), **subject.options)
        if watched:
            watching = partial(_WatchedBackwardPass, flash=self)
            self.module._session.backward_pass_class = watching
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

    # -- called by the backward pass -----------------------------------------------------------

    def recorded(self, path: str, param: nn.Parameter, given: PerSampleGrad, stored: bool) -> None:
        name = self.names[param]
        tap = self.taps.get(path)
        algorithm = "outer_store" if stored else _algorithm(given)
        if tap is not None and tap.rule is not None:
            rule = type(tap.rule).__name__
        else:
            rule = "sample by sample" if getattr(tap, "loops", False) else "bare"
        seen = self.seen.setdefault(name, _Seen())
        seen.rules[rule] = None
        self._note(seen, algorithm, given)
        operands = [x.dtype for x in tensors_in(given) if x.is_floating_point()]
        self.dtype = narrowest([self.dtype, *operands])

    def merged(
        self, factors: Mapping[int, PerSampleGrad], params: Mapping[int, nn.Parameter]
    ) -> None:
        """All uses are in: linear maps that read one input share the work, which may decide."""
        readers = Counter(
            factor.shares_input_with()
            for factor in factors.values()
            if isinstance(factor, LinearGrad)
        )
        for key, factor in factors.items():
            # One that is frozen by now is refused when norms are taken.
            if key in params and isinstance(factor, LinearGrad | TiedEmbeddingGrad):
                seen = self.seen[self.names[params[key]]]
                seen.algorithms, seen.backends = {}, {}
                shared = (
                    readers[factor.shares_input_with()] if isinstance(factor, LinearGrad) else 1
                )
                self._note(seen, _algorithm(factor, shared), factor)

    def _note(self, seen: _Seen, algorithm: str, factor: PerSampleGrad) -> None:
        seen.algorithms[algorithm] = None
        seen.backends[_backend(algorithm, factor, self.module.backend)] = None


class _WatchedBackwardPass(BackwardPass):
    """Tells what is recorded before norms are taken."""

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
        first_pass = self.coef is None
        super().record(path, params, factors, readers)
        if not first_pass:
            return
        kept = factors if self.norms_only else self.factors[len(self.factors) - len(factors) :]
        with torch.no_grad():
            for param, factor, as_kept in zip(params, factors, kept, strict=True):
                formed = isinstance(factor, LinearGrad | ConvolutionGrad) and as_kept is not factor
                self._flash.recorded(path, param, factor, stored=formed)

    def merged(self, keys: Sequence[int]) -> dict[int, PerSampleGrad]:
        factors = super().merged(keys)
        self._flash.merged(factors, self.params)
        return factors


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


_KINDS: dict[type[PerSampleGrad], str] = {
    DenseGrad: "vector",
    SumGrad: "vector",
    EmbeddingGrad: "lookup",
    ConvolutionGrad: "convolution",
    TiedEmbeddingGrad: "tied",
}

# The operation whose kernel decides what to print as backend; the others are PyTorch alone.
_OPERATIONS = {
    "gram": "gram_blocks",
    "outer": "outer_sqnorms",
    "outer_store": "outer_sqnorms",
    "convolution": "outer_sqnorms",
    "lookup": "embedding_sqnorms",
    "tied": "embedding_sqnorms",
}


def _algorithm(factor: PerSampleGrad, shared: int = 1) -> str:
    """What will compute this factor's norms."""
    if isinstance(factor, LinearGrad):
        B, T, d = factor.A_BTd.shape
        itemsize = factor.A_BTd.element_size()
        p, device_type = factor.G_BTp.shape[-1], factor.A_BTd.device.type
        return cost.choose_on(device_type, B, T, d, p, itemsize, may_store=False, shared=shared)
    if parts := getattr(factor, "parts", None):
        return " + ".join(dict.fromkeys(_algorithm(part) for part in parts))
    return _KINDS.get(type(factor), type(factor).__name__.lower())


def _backend(algorithm: str, factor: PerSampleGrad, asked: str) -> str:
    """Which implementation that algorithm runs on, as far as is known before a kernel fails."""
    operands = [x for x in tensors_in(factor) if x.is_floating_point()]
    operation = _OPERATIONS.get(algorithm.partition(" + ")[0])
    if operation is None or not operands or not operands[0].numel():
        return "torch"
    broken = {name for name, dtype in backends._broken if dtype == operands[0].dtype}
    # Kernels for many layers at once are named after those for one.
    if backends._import_error() or any(name.startswith(operation) for name in broken):
        return "torch"
    return backends.resolve(asked, operands[0])


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
