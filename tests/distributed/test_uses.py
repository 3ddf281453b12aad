"""Sharded training by what others bring, and what it sends."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import processes, uses
from tests.distributed.processes import Found


def test_a_model_that_accelerate_prepared_trains_as_single_samples_say(
    by_two: list[Found],
) -> None:
    expected = uses.as_accelerated()
    for of_rank in by_two:
        for run in of_rank["accelerate"]:
            assert run["history"] == [(0.0, 0.5, 2)]
            for name, value in run["end"].items():
                torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in uses.SENT if name != "plain"])
def test_a_private_step_sends_what_others_send(name: str, by_two: list[Found]) -> None:
    """And its own: sums in buckets in place of gradients module by module; no question."""
    buckets = len([*processes.make().parameters()]) if name == "small buckets" else 1
    for of_rank in by_two:
        plain, private = ({**of_rank["sent"][how]} for how in ("plain", name))
        assert plain.pop("c10d::_reduce_scatter_base_") > 1
        (sums,) = (key for key in private if "reduce_scatter" in key)
        assert private.pop(sums) == buckets
        assert private == plain
