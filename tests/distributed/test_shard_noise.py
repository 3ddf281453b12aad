"""Which shard of a parameter a process holds: from placements and its place in the mesh."""

from __future__ import annotations

from itertools import product

import pytest
from torch.distributed.tensor import Replicate, Shard

from flash_clipping.distributed.process_groups import shard_number


@pytest.mark.parametrize(
    ("placements", "shards"),
    [
        ((Shard(0), Shard(1)), 6),
        ((Replicate(), Shard(0)), 3),
        ((Shard(0), Replicate()), 2),
        ((Replicate(), Replicate()), 1),
    ],
)
def test_shards_have_numbers_of_their_own_and_replicas_share_them(
    placements: tuple[object, object], shards: int
) -> None:
    numbers: dict[tuple[int, ...], set[int]] = {}
    for place in product(range(2), range(3)):
        held = tuple(
            at for at, placement in zip(place, placements, strict=True) if placement != Replicate()
        )
        numbers.setdefault(held, set()).add(shard_number(placements, (2, 3), place))
    assert all(len(of_shard) == 1 for of_shard in numbers.values())
    assert {number for of_shard in numbers.values() for number in of_shard} == {*range(shards)}
