"""The words of a draw on the CPU: ChaCha's keystream.

All 20 rounds (RFC 8439) are OpenSSL's. It has no fewer: those of draws with 12 are NumPy's, for
float64, for machines without kernels, and to check what kernels draw.

Shape suffix: ``N`` blocks.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from flash_clipping.errors import InvalidValue
from flash_clipping.randomness.stream import ALL_ROUNDS, Draw

#: Bytes and words (of 32 bits) of a block, and how many blocks a nonce has.
BLOCK_BYTES, BLOCK_WORDS, MOST_BLOCKS = 64, 16, 1 << 32


def words(draw: Draw, blocks: int, *, tensor: int = 0, shard: int = 0, first: int = 0) -> Tensor:
    """``[blocks, 16]``, int32 (the bits of unsigned words), on the CPU."""
    found = torch.empty(blocks, BLOCK_WORDS, dtype=torch.int32)
    Keystream(draw, tensor=tensor, shard=shard, first=first).fill(found)
    return found


#: What is encrypted: the keystream is what becomes of zeros. Kept, for it is wanted at every step.
_ZEROS = memoryview(bytes(1 << 19))


class Keystream:
    """The words of a nonce, from some block on: one stretch after the other.

    Args:
        draw: whose words.
        tensor, shard: which of the draw's nonces.
        first: counter of the first block.

    Raises:
        ValueError: when blocks beyond the last are asked for: their counter would come back to the
            first.
    """

    def __init__(self, draw: Draw, *, tensor: int = 0, shard: int = 0, first: int = 0) -> None:
        # The package's nonce is the counter and RFC 8439's nonce, all of them little-endian.
        nonce = struct.pack("<4I", first, *draw.nonce(tensor, shard))
        self._rounds, self._next = draw.rounds, first
        self._start_16 = np.frombuffer(b"expand 32-byte k" + draw.key + nonce, dtype="<u4")
        self._cipher = Cipher(algorithms.ChaCha20(draw.key, nonce), mode=None).encryptor()

    def fill(self, found: Tensor) -> None:
        """Write the words of the next blocks into ``[blocks, 16]``, int32, contiguous."""
        first, self._next = self._next, self._next + len(found)
        if self._next > MOST_BLOCKS:
            raise InvalidValue(
                f"FC304 Keystream: found {self._next} blocks of words for one tensor; expected "
                f"{MOST_BLOCKS} at most: a nonce has no others. Split the parameter."
            )
        if self._rounds != ALL_ROUNDS:
            start_16N = np.repeat(self._start_16[:, None], len(found), 1)
            start_16N[12] = first + np.arange(len(found))
            found.numpy().view("uint32")[:] = _blocks(start_16N, self._rounds).T
            return
        size = len(found) * BLOCK_BYTES
        zeros = _ZEROS[:size] if size <= len(_ZEROS) else bytes(size)
        self._cipher.update_into(zeros, found.numpy().view("uint8").data)

    def take(self, count: int) -> np.ndarray:
        """``[count]``, uint64: the next words of 64 bits; what is left of their last block is
        dropped."""
        found = torch.empty(-(-count // 8), BLOCK_WORDS, dtype=torch.int32)
        if count:
            self.fill(found)
        return found.numpy().reshape(-1).view(np.uint64)[:count]


def _blocks(start_16N: np.ndarray, rounds: int) -> np.ndarray:
    """``[16, N]``, uint32: RFC 8439, 2.3, for any even number of rounds.

    Each of four rows has one number of four quarter rounds. They work on the columns first; then
    rows are turned, so that diagonals stand in the columns, and back.
    """
    a, b, c, d = start_16N.reshape(4, 4, -1).copy()
    for _ in range(rounds // 2):
        for turns in ((-1, -2, -3), (1, 2, 3)):
            for left, right in ((16, 12), (8, 7)):
                a += b
                d = _rotated(d ^ a, left)
                c += d
                b = _rotated(b ^ c, right)
            b, c, d = (np.roll(row, turn, 0) for row, turn in zip((b, c, d), turns, strict=True))
    mixed_16N: np.ndarray = np.concatenate([a, b, c, d]) + start_16N
    return mixed_16N


def _rotated(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))
