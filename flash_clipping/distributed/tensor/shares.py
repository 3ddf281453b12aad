"""Which part of a parameter's per-sample gradient a process of a tensor mesh has."""

from __future__ import annotations

from enum import Enum

from flash_clipping.errors import FlashClippingError


class Share(Enum):
    """What one process has of a per-sample gradient."""

    #: Elements that no other has: squared norms are added up over processes.
    SHARD = "a shard"
    #: All of it, as every other: counted once.
    WHOLE = "the whole"
    #: A term of a sum, of some of the positions: gradients are added up before they are squared.
    TERM = "a sum over some of the positions"


class Shares:
    """The shares of all parameters, by their ``id``, as layers have found them in forward.

    A parameter that nobody has told of is whole: it was not parallelized.
    """

    def __init__(self) -> None:
        self._of: dict[int, Share] = {}

    def note(self, name: str, key: int, share: Share) -> None:
        """A layer has found its parameter to be this.

        Raises:
            FlashClippingError: another use of it was found to be something else.
        """
        before = self._of.setdefault(key, share)
        if before is not share:
            raise FlashClippingError(
                f"{name}: found a parameter of which a process has {before.value} of the gradient "
                f"in one use, and {share.value} in another. Norms of both cannot be added up. "
                "Give all uses of a parameter inputs of one layout (all cut along the sequence, "
                "or none)."
            )

    def __getitem__(self, key: int) -> Share:
        return self._of.get(key, Share.WHOLE)
