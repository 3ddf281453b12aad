"""The privacy of a trainer's run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flash_clipping.engine.accounting import Mechanism
from flash_clipping.engine.options import Kernels, check_keywords
from flash_clipping.engine.sampling.units import Documents
from flash_clipping.errors import InvalidValue, checked_number

#: Arguments of ``make_private`` that a trainer passes itself.
_OWN = """module optimizer data_loader noise_multiplier max_grad_norm poisson_sampling wrap_model
loss_reduction criterion grad_sample_mode distributed mechanism unit kernels"""


@dataclass(frozen=True)
class PrivacyArguments:
    """The privacy of a run: how much noise, for which bound, and how it is accounted.

    Exactly one of ``target_epsilon`` and ``noise_multiplier`` is given.

    Args:
        target_delta: δ of the (ε, δ) that is reported, and of ``target_epsilon``; well below
            ``1 / len(dataset)``.
        target_epsilon: the ε that the whole run may spend. The noise multiplier is computed from
            it, from the sample rate and from the number of steps.
        noise_multiplier: standard deviation of the noise, as a multiple of 1.01 ``max_grad_norm``.
        max_grad_norm: the clipping bound ``C`` of every sample's gradient. ``None``: the trainer's
            own, where it has one (``TrainingArguments.max_grad_norm``).
        accountant: ``"prv"``, ``"rdp"`` or ``"gdp"``, as in Opacus.
        seed: ``None``: batches and noise are drawn from keys of the operating system's; a run that
            is resumed draws afresh. A number makes them repeat, and a resumed run goes on as if it
            had not been interrupted: for tests. Anyone who knows the seed can subtract the noise.
        secure_mode: refuses a seed, and makes noise by all 20 rounds of ChaCha20 on GPUs, too.
        mechanism: :class:`~flash_clipping.PoissonSampling` with a ``noise_grid``; others need a
            loop of your own.
        unit: for ``PrivateTrainer``, where the data collator makes several rows of an item, or one
            row of several (:class:`~flash_clipping.Documents`).
        kernels: what computes (:class:`~flash_clipping.Kernels`); ``None``: the trainer's own
            choice.
        engine_options: more arguments of :meth:`~flash_clipping.FlashPrivacyEngine.make_private`:
            ``clipping``, ``mode``, ``folded_modules``, ...
        max_physical_batch_size: the most samples that are on the device at a time; ``None``: as
            the trainer's own arguments say.
        few_shapes: whether ``PrivateTrainer`` fills batches up to few sizes while steps are
            replayed as CUDA graphs: by rows that add nothing to the sum, and by padding of texts.
            Draws that are larger than a usual batch are then cut as well.

    Raises:
        ValueError: arguments that contradict each other.
    """

    target_delta: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float | None = None
    accountant: str = "prv"
    seed: int | None = None
    secure_mode: bool = False
    mechanism: Mechanism | None = None
    unit: Documents | None = None
    kernels: Kernels | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)
    max_physical_batch_size: int | None = None
    few_shapes: bool = True

    def __post_init__(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise InvalidValue(
                f"FC801 PrivacyArguments: found target_epsilon={self.target_epsilon} and "
                f"noise_multiplier={self.noise_multiplier}; expected exactly one of them."
            )
        checked_number("target_delta", self.target_delta, "(0, 0.5)", example=1e-5)
        if self.target_epsilon is not None:
            checked_number("target_epsilon", self.target_epsilon, "(0, inf)", example=3.0)
        else:
            checked_number("noise_multiplier", self.noise_multiplier, "[0, inf)", example=1.0)
        if self.max_grad_norm is not None:
            checked_number("max_grad_norm", self.max_grad_norm, "(0, inf)", example=1.0)
        if (most := self.max_physical_batch_size) is not None:
            checked_number("max_physical_batch_size", most, "[1, inf)", example=32, whole=True)
        if taken := sorted(self.engine_options.keys() & _OWN.split()):
            raise InvalidValue(
                f"FC801 PrivacyArguments: found engine_options with {', '.join(taken)}, which the "
                "trainer sets itself or does not support. Leave them out, or train with "
                "FlashPrivacyEngine in a loop of your own."
            )
        check_keywords(self.engine_options)
        is_plain = self.mechanism is None or getattr(self.mechanism, "is_plain", False)
        if not (is_plain and isinstance(self.unit, Documents | None)):
            raise InvalidValue(
                f"FC801 PrivacyArguments: found mechanism={self.mechanism}, unit={self.unit}; "
                "expected PoissonSampling() and Documents(...). Others need a loop of your own."
            )
