"""Streams: published vectors of ChaCha, and no word twice."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import struct
from typing import Any

import numpy as np
import pytest
import torch

from flash_clipping.errors import FlashClippingError
from flash_clipping.randomness import (
    Draw,
    Purpose,
    SecretStream,
    SeededNoiseWarning,
    stream as streams,
)
from flash_clipping.randomness.chacha import (
    MOST_BLOCKS,
    Keystream,
    _blocks,
    words,
)
from tests.support.errors import raises, warns

#: RFC 8439, 2.3.2 (block function) and A.1 (test vectors 1 to 5): key, counter, nonce, keystream.
VECTORS = {
    "2.3.2": (
        bytes(range(32)),
        1,
        "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    "A.1 #1": (
        bytes(32),
        0,
        "000000000000000000000000",
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    "A.1 #2": (
        bytes(32),
        1,
        "000000000000000000000000",
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    "A.1 #3": (
        bytes(31) + b"\1",
        1,
        "000000000000000000000000",
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    "A.1 #4": (
        b"\0\xff" + bytes(30),
        2,
        "000000000000000000000000",
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    "A.1 #5": (
        bytes(32),
        0,
        "000000000000000000000002",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
}

#: ChaCha with 12 rounds and keys of 256 bits: test cases 1 to 3 of Strombergson, "Test Vectors for
#: the Stream Cipher ChaCha" (draft-strombergson-chacha-test-vectors), and second blocks of two. The
#: nonce has 64 bits there; the counter, too, whose upper word is the first of RFC 8439's nonce.
VECTORS_OF_12 = {
    "TC1": (
        bytes(32),
        0,
        "000000000000000000000000",
        "9bf49a6a0755f953811fce125f2683d50429c3bb49e074147e0089a52eae155f"
        "0564f879d27ae3c02ce82834acfa8c793a629f2ca0de6919610be82f411326be",
    ),
    "TC1, block 1": (
        bytes(32),
        1,
        "000000000000000000000000",
        "0bd58841203e74fe86fc71338ce0173dc628ebb719bdcbcc151585214cc089b4"
        "42258dcda14cf111c602b8971b8cc843e91e46ca905151c02744a6b017e69316",
    ),
    "TC2": (
        b"\1" + bytes(31),
        0,
        "000000000000000000000000",
        "12056e595d56b0f6eef090f0cd25a20949248c2790525d0f930218ff0b4ddd10"
        "a6002239d9a454e29e107a7d06fefdfef0210feba044f9f29b1772c960dc29c0",
    ),
    "TC3": (
        bytes(32),
        0,
        "000000000100000000000000",
        "64b8bdf87b828c4b6dbaf7ef698de03df8b33f635714418f9836ade59be12969"
        "46c953a0f38ecffc9ecb98e81d5d99a5edfc8f9a0a45b9e41ef3b31f028f1d0f",
    ),
    "TC3, block 1": (
        bytes(32),
        1,
        "000000000100000000000000",
        "559db4a7f222c442fe23b9a2596a88285122ee4f1363896ea77ca150912ac723"
        "bff04b026a2f807e03b29c02077d7b06fc1ab9827c13c8013a6d83bd3b52a26f",
    ),
}
#: All of them, with their rounds.
CASES = {
    f"{rounds} rounds, {name}": (rounds, *vector)
    for rounds, vectors in ((20, VECTORS), (12, VECTORS_OF_12))
    for name, vector in vectors.items()
}
published = pytest.mark.parametrize(
    ("rounds", "key", "counter", "nonce", "expected"), CASES.values(), ids=CASES
)


class Addressed(Draw):
    """A draw with a nonce of one's own."""

    def nonce(self, tensor: int = 0, shard: int = 0) -> tuple[int, int, int]:
        return tensor, shard, self.number


@published
def test_published_vectors(
    rounds: int, key: bytes, counter: int, nonce: str, expected: str
) -> None:
    three = [int.from_bytes(bytes.fromhex(nonce)[i : i + 4], "little") for i in (0, 4, 8)]
    draw = Addressed(key, Purpose.NOISE, three[2], rounds)
    found = words(draw, 1, tensor=three[0], shard=three[1], first=counter)
    assert found.numpy().tobytes().hex() == expected


def test_fewer_rounds_are_those_of_the_cipher_with_all() -> None:
    """Many blocks at a time, up to the last counter, with 20 rounds against OpenSSL's."""
    draw = Draw(bytes(range(32)), Purpose.NOISE, 2**32 - 1)
    for first in (0, 5, MOST_BLOCKS - 7):
        expected = words(draw, 7, tensor=9, shard=8, first=first).numpy().view(np.uint32)
        numbers = first, *draw.nonce(9, 8)
        start_16 = np.frombuffer(
            b"expand 32-byte k" + draw.key + struct.pack("<4I", *numbers), "<u4"
        )
        start_16N = np.repeat(start_16[:, None], 7, 1)
        start_16N[12] += np.arange(7, dtype=np.uint32)
        assert np.array_equal(_blocks(start_16N, 20).T, expected)


@pytest.mark.parametrize("rounds", [0, 8, 13, 21])
def test_other_rounds_are_refused(rounds: int) -> None:
    with raises("FC302", ValueError, match=f"rounds: found {rounds}; expected 20 or 12"):
        SecretStream().draw(Purpose.NOISE, rounds)


def test_nonces_are_of_one_draw_tensor_shard_and_purpose() -> None:
    nonces = {
        Draw(b"", purpose, number).nonce(tensor, shard)
        for purpose in Purpose
        for number in (0, 1, 255, 256, streams.MOST_DRAWS - 1)
        for tensor in (0, 1, streams.MOST_TENSORS - 1)
        for shard in (0, 1, 255, streams.MOST_SHARDS - 1)
    }
    assert len(nonces) == len(Purpose) * 5 * 3 * 4
    assert all(0 <= word < 1 << 32 for nonce in nonces for word in nonce)


@pytest.mark.parametrize("numbers", [{"tensor": 1 << 32}, {"shard": 1 << 24}, {"shard": -1}])
def test_numbers_that_do_not_fit(numbers: dict[str, int]) -> None:
    with raises("FC302", ValueError, match=r"found number .* expected 0 or more"):
        Draw(b"", Purpose.NOISE, 0).nonce(**numbers)


def test_blocks_that_would_come_back() -> None:
    draw = SecretStream().draw(Purpose.NOISE)
    with raises("FC304", ValueError):
        words(draw, 2, first=MOST_BLOCKS - 1)
    assert words(draw, 1, first=MOST_BLOCKS - 1).shape == (1, 16)


@pytest.mark.parametrize("rounds", [20, 12])
def test_blocks_are_addressed(rounds: int) -> None:
    draw = SecretStream().draw(Purpose.SAMPLING, rounds)
    whole = words(draw, 40)
    assert torch.equal(words(draw, 8, first=32), whole[32:])
    numbers = Keystream(draw, first=2).take(21)
    assert np.array_equal(numbers, whole[2:].numpy().reshape(-1).view(np.uint64)[:21])
    assert not torch.equal(words(draw, 8, tensor=1), whole[:8])
    parts = torch.empty(40, 16, dtype=torch.int32)
    keystream = Keystream(draw)
    keystream.fill(parts[:13]), keystream.fill(parts[13:])
    assert torch.equal(parts, whole)


def test_draws_never_repeat() -> None:
    stream = SecretStream()
    draws = [stream.draw(purpose) for purpose in (Purpose.NOISE, Purpose.NOISE, Purpose.COUNT)]
    assert len({words(draw, 1).numpy().tobytes() for draw in draws}) == 3


def test_torchs_generators_are_not_read_or_touched() -> None:
    before = torch.get_rng_state()
    torch.manual_seed(3)
    first = words(SecretStream().draw(Purpose.NOISE), 1)
    torch.manual_seed(3)
    at = torch.get_rng_state()
    second = words(SecretStream().draw(Purpose.NOISE), 1)
    assert torch.equal(torch.get_rng_state(), at)
    assert not torch.equal(first, second)
    torch.set_rng_state(before)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.filterwarnings("ignore::flash_clipping.randomness.SeededNoiseWarning")
def test_copies_take_new_keys(copied: Any, seed: int | None) -> None:
    stream = SecretStream(seed=seed)
    other = copied(stream)
    assert other.draw(Purpose.NOISE).key != stream.draw(Purpose.NOISE).key
    assert not other.is_seeded


def _draw_in_a_fork(stream: SecretStream, keys: Any) -> None:
    keys.put([stream.draw(Purpose.NOISE).key for _ in range(2)])


def test_forked_processes_take_new_keys() -> None:
    fork = multiprocessing.get_context("fork")
    stream, keys = SecretStream(), fork.SimpleQueue()
    child = fork.Process(target=_draw_in_a_fork, args=(stream, keys))
    child.start()
    first, second = keys.get()
    child.join()
    assert first == second != stream.draw(Purpose.NOISE).key


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_with_the_number_of_its_parent_takes_a_new_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers of processes are used again, and two of them may have one in other namespaces."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    stream = SecretStream()
    before = stream.draw(Purpose.NOISE)
    shared = SecretStream(key=bytes(32))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            shared.draw(Purpose.NOISE)
            os.write(write, b"shared")
        except FlashClippingError:
            first, second = (stream.draw(Purpose.NOISE) for _ in range(2))
            grandchild = os.fork()
            if grandchild:
                os.waitpid(grandchild, 0)
                os.write(write, first.key + second.key)
            else:
                os.write(write, stream.draw(Purpose.NOISE).key)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    found = os.read(read, 1000)
    os.close(read), os.close(write)
    below, first, second = found[:32], found[32:64], found[64:]
    assert len(found) == 96 and first == second
    after = stream.draw(Purpose.NOISE)
    assert after.key == before.key and after.number == before.number + 1
    assert len({below, first, after.key}) == 3


def test_shared_keys_are_not_copied() -> None:
    stream = SecretStream(key=bytes(32))
    assert stream.draw(Purpose.NOISE).key == bytes(32)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with raises("FC572"):
            copied(stream)


def test_a_seed_is_said_loudly() -> None:
    with warns("FC570", SeededNoiseWarning, match="5"):
        first = SecretStream(seed=5)
    with warns("FC570", SeededNoiseWarning):
        second = SecretStream(seed=5)
    assert first.draw(Purpose.NOISE) == second.draw(Purpose.NOISE)
    assert first.state_dict()["seed"] == 5


def test_another_stream_has_a_key_of_its_own() -> None:
    """Of a seed its own and these numbers', said once; of none a new key."""
    with warns("FC570", SeededNoiseWarning):
        seeded = SecretStream(seed=5)
    keys = [
        stream.another(*numbers).draw(Purpose.NOISE).key
        for stream in (seeded, SecretStream())
        for numbers in ((), (1,), (1, 2), (12,))
    ]
    assert len({*keys, seeded.draw(Purpose.NOISE).key}) == 9
    assert seeded.another(1, 2).draw(Purpose.NOISE).key == keys[2]
    assert seeded.another(1).is_seeded


@pytest.mark.filterwarnings("ignore::flash_clipping.randomness.SeededNoiseWarning")
def test_a_resumed_run_draws_nothing_again() -> None:
    first = SecretStream(seed=5)
    seen = {first.draw(Purpose.NOISE) for _ in range(3)}
    state = first.state_dict()
    again = SecretStream(seed=5)
    again.load_state_dict(state)
    assert again.draw(Purpose.NOISE) not in seen
    other = SecretStream()
    other.load_state_dict(state)
    assert other.draw(Purpose.NOISE).key not in {draw.key for draw in seen}


def test_draws_past_the_last_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_DRAWS", 2)
    stream = SecretStream()
    stream.draw(Purpose.NOISE), stream.draw(Purpose.NOISE)
    with raises("FC571"):
        stream.draw(Purpose.NOISE)


def test_keys_are_not_shown() -> None:
    stream = SecretStream()
    draw = stream.draw(Purpose.NOISE)
    shown = f"{stream} {draw} {stream.state_dict()}"
    assert draw.key.hex() not in shown and repr(draw.key) not in shown
