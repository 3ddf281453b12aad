"""Samples by their number, of data that can only be read from its beginning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import accumulate, pairwise
from typing import Any

from torch.utils.data import Dataset

from flash_clipping.errors import FlashClippingError, InvalidValue


class StreamedDataset(Dataset[Any]):
    """A dataset of streams: shards of known sizes, one after the other.

    A batch reads those shards that have one of its samples, each from its beginning to its last
    sample in the batch. With one large stream that is nearly all of it in every step, with many
    small shards little more than the batch.

    Args:
        shards: streams that can be read again and again, such as an ``IterableDataset`` or a list;
            for WebDataset one for each tar file.
        sizes: how many samples each shard has; ``None``: what ``len`` says.

    Guarantees:
        A shard that has another size is an error, never a sample more or less: all of it is
        counted when it is read for the first time, in every process that reads it.

    Assumptions:
        Every time that a shard is read it has every sample once, in the same order. With
        ``sampling="poisson"`` and without units the order may change, if it does not depend on
        what is drawn: steps are independent, and each draws from one reading.

    Raises:
        ValueError: the size of a shard is not known.
    """

    def __init__(self, shards: Sequence[Iterable[Any]], sizes: Sequence[int] | None = None):
        if sizes is None:
            if unknown := [n for n, shard in enumerate(shards) if not isinstance(shard, Sized)]:
                raise InvalidValue(
                    f"FC334 StreamedDataset: found shard {unknown[0]}, a "
                    f"{type(shards[unknown[0]]).__name__} without __len__; expected a known size: "
                    "the sample rate is a share of it. Count it once:\n"
                    "    StreamedDataset(shards, sizes=[sum(1 for _ in s) for s in shards])"
                )
            sizes = [len(shard) for shard in shards]  # type: ignore[arg-type]
        if len(sizes) != len(shards) or any(size < 0 for size in sizes):
            raise InvalidValue(
                f"FC334 StreamedDataset: found sizes {[*sizes]} for {len(shards)} shards; expected "
                "the number of samples of each."
            )
        self.shards = shards
        self._ends = [0, *accumulate(sizes)]
        self._counted: set[int] = set()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """The samples of these numbers, in this order."""
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"StreamedDataset: found sample {index} of {len(self)}.")
        found: dict[int, Any] = {}
        for shard, (start, end) in enumerate(pairwise(self._ends)):
            wanted = {index - start for index in indices if start <= index < end}
            if wanted:
                found |= {start + n: sample for n, sample in self._read(shard, end - start, wanted)}
        return [found[index] for index in indices]

    def _read(self, shard: int, size: int, wanted: set[int]) -> Iterator[tuple[int, Any]]:
        """These samples of a shard, and their numbers."""
        last, count = max(wanted), 0
        for count, sample in enumerate(self.shards[shard], 1):
            if count - 1 in wanted:
                yield count - 1, sample
            if count > last and shard in self._counted:
                return
        if count != size:
            raise FlashClippingError(
                f"FC334 StreamedDataset: found {count} samples in shard {shard}; expected {size}, "
                "by which samples are drawn. Give its true size, and a stream that begins again. "
                "(One that gives each worker a part needs DataLoader(num_workers=0).)"
            )
        self._counted.add(shard)
