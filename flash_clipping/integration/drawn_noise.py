"""Noise that is drawn twice can be subtracted: no state of a generator serves two draws."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flash_clipping.errors import FlashClippingError

#: States of generators on the CPU that are remembered: some 10 MB.
REMEMBERED = 1 << 16


class DrawnStates:
    """The states that one optimizer's noise was drawn from.

    A CUDA generator tells its seed and how far it has come, so that any way back is seen. One on
    the CPU has only its state, of which a hash is kept: the last :data:`REMEMBERED`.
    """

    def __init__(self) -> None:
        self._seen: dict[int, None] = {}
        #: How far a GPU's generator has come, by the GPU's number and the seed.
        self._reached: dict[tuple[int, int], int] = {}

    def check(self, generators: Iterable[torch.Generator]) -> None:
        """Refuse states that noise was drawn from already. Never waits for the device.

        Raises:
            FlashClippingError: these draws would repeat earlier ones.
        """
        for generator in generators:
            if generator.device.type == "cuda":
                if generator.get_offset() < self._reached.get(_name(generator), 0):
                    _refuse(generator, f"seed {generator.initial_seed()}")
            elif hash(generator.get_state().numpy().tobytes()) in self._seen:
                _refuse(generator, "the same state")

    def note(self, generators: Iterable[torch.Generator]) -> None:
        """Remember these states, just before noise is drawn from them."""
        for generator in generators:
            if generator.device.type == "cuda":
                continue
            self._seen[hash(generator.get_state().numpy().tobytes())] = None
            if len(self._seen) > REMEMBERED:
                del self._seen[next(iter(self._seen))]

    def note_end(self, generators: Iterable[torch.Generator]) -> None:
        """Remember how far the generators have come, just after noise was drawn from them."""
        for generator in generators:
            if generator.device.type == "cuda":
                name, offset = _name(generator), generator.get_offset()
                self._reached[name] = max(self._reached.get(name, 0), offset)


def _name(generator: torch.Generator) -> tuple[int, int]:
    return generator.device.index or 0, generator.initial_seed()


def _refuse(generator: torch.Generator, found: str) -> None:
    raise FlashClippingError(
        f"Noise was drawn from this generator on {generator.device} at {found} before: the same "
        "noise in two steps can be subtracted. Was torch.manual_seed(), Generator.manual_seed() or "
        "set_state() called between steps? Seed once, before training; go on from a checkpoint "
        "with another seed."
    )
