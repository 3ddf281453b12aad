"""What hands factors to the running backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from flash_clipping.capture.declared_rows import DeclaredRows
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import PerSampleGrad
from flash_clipping.finish.backward_pass import BackwardPass, Readers


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
            session.folded.add(path)
        #: Whether what its parameters meet is the same for all samples.
        self.reads_constants = False
        #: Functions that were called with a parameter of it and samples, of which the next may go a
        #: short way: in which epoch, in which dtype, and how many axes these had.
        self.served: dict[Any, tuple[int, Any, int]] = {}
        #: Under which circumstances the module's forward, if it is running, was entered.
        self.entered: Any = None

    @property
    def folded(self) -> bool:
        """Whether its rows are parts of samples: it was declared, or a probe has shown it."""
        return self.path in self.session.folded

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
        if rows is not None:
            backward_pass = self.running_backward_pass(recomputed)
            of_samples = [rows.of_samples(factor) for factor in factors]
            backward_pass.record(self.path, params, of_samples)
            return
        self.record_on(self.running_backward_pass(recomputed), params, factors, readers, samples)

    def running_backward_pass(self, recomputed: bool) -> BackwardPass:
        """The running backward pass; a new one if this is the first layer that it reached.

        ``recomputed``: the layer ran in backward itself (activation checkpointing).

        Raises:
            FlashClippingError: no backward pass of the model's outputs is running.
        """
        backward_pass = self.session.backward_pass
        if backward_pass is None:
            if recomputed:
                raise FlashClippingError(
                    f"{self.path}: re-entrant activation checkpointing reached this layer before "
                    "the model's own output. Compute the loss from what the wrapped model "
                    "returns, or use checkpoint(..., use_reentrant=False)."
                )
            if self.session.awaits_two_passes():
                raise FlashClippingError(
                    f"{self.path}: mode='two_pass' got a gradient past the model's outputs: the "
                    "loss uses a tensor that the model kept on a module or returned inside an "
                    f"object that cannot be opened (found: {self.session.returned}), or this "
                    "layer was called by itself. Return the tensor, in a tuple, list, dict or "
                    "dataclass; call the layer in the model's forward; or use mode='one_pass'."
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
        samples: int | None = None,
    ) -> None:
        """Hand factors, one for each of these parameters, to this backward pass."""
        if self.folded:
            if readers is not None:
                samples = readers[0].batch_size
            factors = [f if f.batch_size == samples else self._fold(f, samples) for f in factors]
        backward_pass.record(self.path, params, factors, readers)

    def _fold(self, factor: PerSampleGrad, samples: int | None) -> PerSampleGrad:
        """Rows that the user declared to be parts of samples, as samples; ``samples``: how many
        there are in the call of the root that they are of, if that is known."""
        if self.session.positions is not None:
            return factor  # of positions, which become units
        samples = self.session.samples() if samples is None else samples
        if samples is None or factor.batch_size % max(samples, 1):
            raise FlashClippingError(
                f"{self.path}: its rows are parts of samples (declared in folded_modules, or found "
                f"in the first step), but its {factor.batch_size} rows are no multiple of the "
                f"batch ({samples}) that the model was called with. Every sample must be folded "
                "into the same number of rows, which lie together."
            )
        return factor if factor.batch_size == samples else factor.fold(samples)
