"""The secret stream that noise is drawn from: the engine's, an optimizer's own, or a seed's."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant

from flash_clipping.engine.accounting import FeasiblePrvAccountant, relation_of
from flash_clipping.randomness import SecretStream

#: Of the stream, in a checkpoint of the engine's.
IN_CHECKPOINTS = "noise_stream_state_dict"


def stream_of(
    stream: SecretStream | None, generator: torch.Generator | None, secure_mode: bool = False
) -> SecretStream:
    """The stream of an optimizer, or a loader, that was given these.

    Args:
        stream: taken as it is; ``None``: one with a key of its own.
        generator: a seed in Opacus' way: a number is drawn from it.
        secure_mode: refuse seeds.

    Raises:
        ValueError: a seed in secure mode; a stream and a generator.
    """
    if secure_mode and (generator is not None or (stream is not None and stream.is_seeded)):
        raise ValueError(
            "secure_mode=True: found a seed for the noise (a generator, or a seeded stream), which "
            "whoever knows it can subtract. Leave one of them out."
        )
    if generator is None:
        return SecretStream() if stream is None else stream
    if stream is not None:
        raise ValueError("FlashDPOptimizer: found a stream and a generator; expected one of them.")
    seed = torch.randint(1 << 62, (1,), generator=generator, device=generator.device)
    return SecretStream(seed=int(seed))


def seed_notice(*streams: SecretStream | None) -> str:
    """What a report of ε says besides, where noise or batches come from a seed."""
    seeds = sorted({s.seed for s in streams if s is not None and s.seed is not None})
    if not seeds:
        return ""
    named = ", ".join(map(str, seeds))
    return f"   SEEDED ({named}): NO ε HOLDS against whoever knows the seed"


class SecretNoiseEngine(PrivacyEngine):
    """Opacus' engine with a secret stream, whose state it keeps in checkpoints.

    Arguments and attributes: see :class:`~flash_clipping.FlashPrivacyEngine`.
    """

    accountant: Any
    #: Whether Opacus' own source of randomness was asked for.
    _has_opacus_randomness = False

    def __init__(
        self, *, accountant: str = "prv", secure_mode: bool = False, seed: int | None = None
    ):
        if secure_mode and seed is not None:
            raise ValueError(
                f"FlashPrivacyEngine: found seed={seed} with secure_mode=True: whoever knows the "
                "seed can subtract the noise. Leave one of them out."
            )
        with warnings.catch_warnings():
            # That noise is not secure: it is. Modes of Opacus warn where they are used.
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            super().__init__(accountant=accountant, secure_mode=False)
        if type(self.accountant) is PRVAccountant:
            self.accountant = FeasiblePrvAccountant()
        self.secure_mode = secure_mode
        self.stream = SecretStream(seed=seed)

    def _use_opacus_randomness(self) -> None:
        """What Opacus' engine says and does of secure mode when it is made; once."""
        if not self._has_opacus_randomness:
            self.secure_rng = PrivacyEngine(secure_mode=self.secure_mode).secure_rng
            self._has_opacus_randomness = True

    def summary(self, delta: float, *, optimizer: Any = None) -> str:
        """What was spent, in a line to report: ε with δ, and which datasets they compare.

        Args:
            delta: δ.
            optimizer: what ``make_private`` returned; its noise may have a seed of its own.

        Guarantees:
            A seed is named, loudly: the engine's, or that of the optimizer's noise.
        """
        found = f"ε = {self.get_epsilon(delta):.4g} at δ = {delta:g}"
        relation = relation_of(self.accountant)
        return f"{found} ({relation})" + seed_notice(
            self.stream, getattr(optimizer, "stream", None)
        )

    def save_checkpoint(
        self, *, optimizer: Any = None, checkpoint_dict: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """As in Opacus, and how far the noise's stream has come; its key is in no checkpoint."""
        state = getattr(optimizer, "stream", self.stream).state_dict()
        checkpoint_dict = {**(checkpoint_dict or {}), IN_CHECKPOINTS: state}
        super().save_checkpoint(optimizer=optimizer, checkpoint_dict=checkpoint_dict, **kwargs)

    def load_checkpoint(self, *, optimizer: Any = None, **kwargs: Any) -> Any:
        """As in Opacus. Noise goes on from this process's own key, or, with the seed of the
        checkpoint, behind what it had drawn: nothing is drawn again."""
        checkpoint = super().load_checkpoint(optimizer=optimizer, **kwargs)
        if IN_CHECKPOINTS in checkpoint:
            getattr(optimizer, "stream", self.stream).load_state_dict(checkpoint[IN_CHECKPOINTS])
        return checkpoint
