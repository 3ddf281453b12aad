"""Keys of 256 bits, and which words of a key each draw takes.

A *stream* is all that ChaCha (RFC 8439) makes of one key. Its words are addressed: by a nonce of 96
bits and a block counter of 32. A caller takes a :class:`Draw`, a purpose and a number that
no other draw from that key has; tensors and shards of one draw have nonces of their own. So no word
is used twice, and what a shard or a GPU draws does not depend on who draws besides.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import warnings
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from flash_clipping.errors import Coded, FlashClippingError, InvalidValue

KEY_BYTES = 32

#: Rounds of the cipher: those of RFC 8439; and those of noise that a GPU draws, where nobody asks
#: for more. ``docs/noise.md`` says why they are enough.
ALL_ROUNDS, FEWER_ROUNDS = 20, 12

#: Numbers of draws, tensors and shards are below these.
MOST_DRAWS, MOST_TENSORS, MOST_SHARDS = 1 << 32, 1 << 32, 1 << 24


#: How often this process's memory was copied by a fork, over all of its ancestors.
_forks = 0


def _note_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def _this_process() -> tuple[int, int]:
    """Identity of a process: a number alone may be used again after a fork."""
    return os.getpid(), _forks


class SeededNoiseWarning(Coded, UserWarning):
    """Noise and batches come from a seed: whoever knows it can take the noise away."""


class Purpose(IntEnum):
    """Use of words: part of the nonce, so that purposes never share one."""

    #: Noise on the clipped sums.
    NOISE = 1
    #: Noise on the count of adaptive clipping.
    COUNT = 2
    #: Which samples are in a batch.
    SAMPLING = 3
    #: A process's part of a key that several agree on.
    KEY = 4


@dataclass(frozen=True)
class Draw:
    """One use of a stream: words that no other draw gives.

    Attributes:
        key: 32 bytes.
        purpose: what the words are for.
        number: of this draw among all of this key.
        rounds: of the cipher, 20 or 12.

    Raises:
        ValueError: other ``rounds``.
    """

    key: bytes
    purpose: Purpose
    number: int
    rounds: int = ALL_ROUNDS

    def __post_init__(self) -> None:
        if self.rounds not in (ALL_ROUNDS, FEWER_ROUNDS):
            raise InvalidValue(
                f"FC302 rounds: found {self.rounds}; expected {ALL_ROUNDS} or {FEWER_ROUNDS}."
            )

    def nonce(self, tensor: int = 0, shard: int = 0) -> tuple[int, int, int]:
        """The nonce's three words of 32 bits for a tensor of this draw, or one shard of it.

        Raises:
            ValueError: a number that does not fit: another one would have the same nonce.
        """
        for name, found, most in (
            ("draw", self.number, MOST_DRAWS),
            ("tensor", tensor, MOST_TENSORS),
            ("shard", shard, MOST_SHARDS),
        ):
            if not 0 <= found < most:
                raise InvalidValue(
                    f"FC302 {name}: found number {found}; expected 0 or more, below {most}."
                )
        return self.number, tensor, shard << 8 | int(self.purpose)

    def __repr__(self) -> str:  # a key does not belong in a log
        return f"Draw({self.purpose.name}, {self.number})"


class SecretStream:
    """A key of the operating system's, and how many draws were taken from it.

    The key belongs to this object in this process: a copy, an object that was unpickled and a
    forked process take new keys of their own. It is in no checkpoint.

    Args:
        seed: for tests and debugging: makes the key from this number. Equal seeds give equal
            words, in this run and in all others.
        key: 32 bytes that several processes have agreed on.

    Warns:
        SeededNoiseWarning: a seed was given.
    """

    def __init__(self, *, seed: int | None = None, key: bytes | None = None):
        if seed is not None and key is not None:
            raise InvalidValue(
                "FC312 SecretStream: found a seed and a key; expected one of them at most."
            )
        if key is not None and len(key) != KEY_BYTES:
            raise InvalidValue(f"FC302 key: found {len(key)} bytes; expected {KEY_BYTES}.")
        self.seed = seed
        self._is_shared = key is not None
        if seed is not None:
            warnings.warn(
                f"FC570 Noise and batches are drawn from seed {seed}: whoever knows it can "
                "subtract the noise, and no epsilon holds against them. Two runs with one seed "
                "draw the same. Use it for tests and debugging; train what you release without it.",
                SeededNoiseWarning,
                stacklevel=3,
            )
            key = _key_of(str(seed))
        self._take(key or secrets.token_bytes(KEY_BYTES))

    def _take(self, key: bytes) -> None:
        self._key = key
        self._process = _this_process()
        self._numbers = itertools.count()
        self._drawn = 0

    def draw(self, purpose: Purpose, rounds: int = ALL_ROUNDS) -> Draw:
        """Words that were never drawn before, and will never be again, by so many rounds.

        Raises:
            FlashClippingError: all numbers are spent; a key that processes share in a fork.
        """
        if _this_process() != self._process:
            self._check_own("a process that was forked")
            self.seed = None
            self._take(secrets.token_bytes(KEY_BYTES))
        number = next(self._numbers)  # one step for all threads
        self._drawn = number + 1
        if number >= MOST_DRAWS:
            raise FlashClippingError(
                f"FC571 The noise's key was used for {number} draws, and every further one would "
                "repeat words of an earlier one. Go on from a checkpoint in a new process: it "
                "takes a new key."
            )
        return Draw(self._key, purpose, number, rounds)

    def another(self, *numbers: int) -> SecretStream:
        """A stream with a key of its own; of a seeded one, with the key of its seed and these
        numbers. Equal numbers give one key again: each purpose takes its own."""
        stream = SecretStream()
        if self.seed is not None:  # which was said already
            stream.seed = self.seed
            stream._take(_key_of(f"{self.seed} {numbers}"))
        return stream

    @property
    def is_seeded(self) -> bool:
        """Whether the words are those of a seed."""
        return self.seed is not None

    # -- checkpoints and copies -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: no key, but a digest of it and how many draws were taken."""
        return {"key_digest": self._digest(), "draws": self._drawn, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind a checkpoint's draws, if this is its key (a seeded run that is resumed)."""
        if state["key_digest"] == self._digest() and state["draws"] > self._drawn:
            self._drawn = state["draws"]
            self._numbers = itertools.count(self._drawn)

    def _digest(self) -> str:
        return hashlib.sha256(b"flash_clipping key" + self._key).hexdigest()[:16]

    def __deepcopy__(self, memo: Any) -> SecretStream:
        self._check_own("a copy")
        return SecretStream()

    def __copy__(self) -> SecretStream:
        return self.__deepcopy__(None)

    def __reduce__(self) -> Any:
        self._check_own("a pickle")
        return SecretStream, ()

    def _check_own(self, found: str) -> None:
        if self._is_shared:
            raise FlashClippingError(
                "FC572 The noise's key is shared by the processes of a sharded model: found "
                f"{found} of its stream, which would draw the same noise again or other noise than "
                "its replicas. Make the model private in the processes that train it."
            )

    def __repr__(self) -> str:
        return f"SecretStream(draws={self._drawn}, seed={self.seed})"


def seed_notice(stream: SecretStream) -> str:
    """A warning to stand behind ε, where noise and batches come from a seed; else empty."""
    if stream.seed is None:
        return ""
    return f"   SEEDED ({stream.seed}): NO ε HOLDS against whoever knows the seed"


def _key_of(seed: str) -> bytes:
    return hashlib.sha256(f"flash_clipping seed {seed}".encode()).digest()
