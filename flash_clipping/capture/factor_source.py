"""A module that owns parameters: which these are, and how their factors are recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from flash_clipping.capture.declared_rows import DeclaredRows
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError
from flash_clipping.factors import PerSampleGrad
from flash_clipping.finish.backward_pass import BackwardPass, Readers
from flash_clipping.ops.runtime.checks import check_on_device

#: Names and parameters that are a layer's own and trainable.
Trainable: TypeAlias = tuple[list[str], list[nn.Parameter]]

#: Modules that hold parameters for their parent and are never called.
PARAMETER_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


def owners(module: nn.Module) -> list[nn.Module]:
    """The module and the containers below it whose parameters its forward uses."""
    found = [module]
    for child in module.children():
        if isinstance(child, PARAMETER_CONTAINERS):
            found += owners(child)
    return found


def owned_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that the module's own forward uses directly."""
    return [p for owner in owners(module) for p in owner.parameters(recurse=False)]


def ordinary_gradients(
    session: ClippingSession,
    params: Iterable[nn.Parameter],
    factors: Iterable[tuple[nn.Parameter, PerSampleGrad]],
) -> list[Tensor | None]:
    """Gradients of these parameters summed over the batch, as autograd has them where nothing is
    recorded; ``None`` for those without a factor."""
    sums: dict[nn.Parameter, Tensor] = {}
    for param, factor in factors:
        grad = factor.clipped_sum(None, session.options.backend).view_as(param).to(param.dtype)
        sums[param] = sums[param] + grad if param in sums else grad
    return [*map(sums.get, params)]


class Guard(dict[None, None]):
    """Refuses gradients that went past a parameter's tap; ``__getitem__`` is the parameter's hook.

    Autograd calls the hook in every backward, with ``None`` where the tap has consumed the
    gradient. This entry is there, so that Python code runs for other gradients only.

    Args:
        name: of the parameter, for the message.
        why: the consequence, and what to do instead.
        session: knows whether backward passes are recorded.
    """

    def __init__(self, name: str, why: str, session: ClippingSession):
        super().__init__({None: None})
        self.name, self.why, self.session = name, why, session

    def __missing__(self, grad: Tensor) -> None:
        if self.session.mode.enabled:
            raise FlashClippingError(
                f"FC142 {self.name}: this parameter received a gradient from outside the module "
                f"that owns it; it would be {self.why}"
            )


class FactorSource:
    """A module's place in the model, as far as recording its factors goes; a tap is one.

    Args:
        path: its name in the model and its type, for messages.
        owners: the module and the containers whose parameters its forward uses.
        folded: its rows are parts of samples (``folded_modules``).
    """

    def __init__(self, path: str, session: ClippingSession, owners: list[nn.Module], folded: bool):
        self.path = path
        self.session = session
        self.owners = owners
        if folded:
            session.known.folded.add(path)
        #: Whether what its parameters meet is the same for all samples.
        self.reads_constants = False
        #: Whether per-sample gradients are formed by functions' own backwards, and by no formula.
        self.by_function = False
        #: Under which circumstances the module's forward, if it is running, was entered.
        self.entered: Any = None

    @property
    def folded(self) -> bool:
        """Whether its rows are parts of samples: it was declared, or a proof has shown it."""
        return self.path in self.session.known.folded

    @property
    def folds(self) -> bool:
        """Whether what is recorded of its rows becomes that of samples, not of units."""
        return self.folded and self.session.rows.positions is None

    def parts(self, rows: int, samples: int | None) -> int:
        """How many consecutive rows are one sample's, as :meth:`record` will have it; 1 where that
        is for it to refuse."""
        if not self.folds:
            return 1
        samples = self.session.samples() if samples is None else samples
        return rows // samples if samples and rows % samples == 0 else 1

    def record(
        self,
        params: Sequence[nn.Parameter],
        factors: Sequence[PerSampleGrad],
        recomputed: bool,
        readers: Readers | None = None,
        rows: DeclaredRows | None = None,
        samples: int | None = None,
    ) -> None:
        """Hand factors, one for each of these parameters, to the running backward pass.

        Args:
            recomputed: the layer ran in backward itself (activation checkpointing).
            readers: which layers read the same input, where that is of use.
            rows: they are of rows, which belong to these samples.
            samples: how many there are in the call of the root that they are of, where ``readers``
                does not tell.
        """
        backward_pass = self.running_backward_pass(recomputed)
        self.record_on(backward_pass, params, factors, readers, rows, samples)

    def running_backward_pass(self, recomputed: bool) -> BackwardPass:
        """The running backward pass; a new one if this is the first layer that it reached."""
        backward_pass = self.session.calls.running_pass()
        if backward_pass is None:
            if recomputed:
                raise FlashClippingError(
                    f"FC234 {self.path}: re-entrant activation checkpointing reached this layer "
                    "before the model's own output. Compute the loss from what the wrapped model "
                    "returns, or use checkpoint(..., use_reentrant=False)."
                )
            backward_pass = self.session.begin_backward()
        backward_pass.is_checkpointed |= recomputed
        return backward_pass

    def record_on(
        self,
        backward_pass: BackwardPass,
        params: Sequence[nn.Parameter],
        factors: Sequence[PerSampleGrad],
        readers: Readers | None = None,
        rows: DeclaredRows | None = None,
        samples: int | None = None,
    ) -> None:
        """Hand factors, one for each of these parameters, to this backward pass."""
        if rows is not None:
            factors, readers = [rows.of_samples(factor) for factor in factors], None
        elif self.folds:
            if readers is not None:
                samples = readers[0].batch_size
            if samples is None:
                samples = self.session.samples()
            has_parts = any(f.batch_size != samples for f in factors)
            factors = [f if f.batch_size == samples else self._fold(f, samples) for f in factors]
            if self.path in self.session.known.unreached:
                self._check_unreached(factors, has_parts)
        backward_pass.record(self.path, params, factors, readers)

    def _check_unreached(self, factors: Sequence[PerSampleGrad], has_parts: bool) -> None:
        """Refuse a gradient that is not 0, of rows of which nobody has seen whose they are.

        Args:
            has_parts: samples have several rows.
        """
        name = self.path.partition(" (")[0]
        instead = ONE_BY_ONE
        if has_parts and name != "the model":
            instead = (
                "\nOr say that the rows of a sample lie together:\n"
                f'    folded_modules=["{name}"]{ONE_BY_ONE}'
            )
        try:
            for factor in factors:
                is_0 = (factor.sqnorms(self.session.options.backend) == 0).all()
                check_on_device(
                    is_0,
                    f"FC230 {self.path}: a gradient reaches this layer for the first time, and "
                    "none has shown which of its rows belong to which sample. Clear the gradients "
                    "and run this step again. Or return the loss with a row for each "
                    f"sample.{instead}",
                )
        except FlashClippingError:
            self.session.proof.proven_with = -1  # the next forward looks again
            raise

    def _fold(self, factor: PerSampleGrad, samples: int | None) -> PerSampleGrad:
        """Rows that are parts of samples, as samples."""
        if samples is None or factor.batch_size % max(samples, 1):
            raise FlashClippingError(
                f"FC201 {self.path}: its rows are parts of samples (declared in folded_modules, or "
                f"found in the first step), but its {factor.batch_size} rows are no multiple of "
                f"the batch ({samples}). Fold every sample into the same number of rows, which lie "
                "together."
            )
        return factor.fold(samples)
