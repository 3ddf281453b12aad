"""The secret stream that noise is drawn from: the engine's, an optimizer's own, or a seed's."""

from __future__ import annotations

import torch

from flash_clipping.randomness import SecretStream


def stream_of(
    stream: SecretStream | None, generator: torch.Generator | None, secure_mode: bool = False
) -> SecretStream:
    """The stream of an optimizer, or a loader: the given one, one of a seed (a number that is drawn
    from ``generator``, in Opacus' way), or one with a key of its own. ``secure_mode`` refuses
    seeds."""
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
    """A warning to stand behind ε, where noise or batches come from a seed; else empty."""
    seeds = sorted({s.seed for s in streams if s is not None and s.seed is not None})
    if not seeds:
        return ""
    named = ", ".join(map(str, seeds))
    return f"   SEEDED ({named}): NO ε HOLDS against whoever knows the seed"
