"""Sharded training by what others bring, and what it sends."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import uses
from tests.distributed.processes import Found


@pytest.mark.parametrize("name", ["llama", "LoRA"])
def test_models_of_transformers_and_peft(name: str, by_two: list[Found]) -> None:
    """Their norms are taken in fp32 by the model itself."""
    assert max(of_rank[name] for of_rank in by_two) <= 1e-6


def test_a_model_that_accelerate_prepared_trains_as_single_samples_say(
    by_two: list[Found],
) -> None:
    expected = uses.as_accelerated()
    for of_rank in by_two:
        for run in of_rank["accelerate"]:
            assert run["history"] == [(0.0, 0.5, 2)]
            for name, value in run["end"].items():
                torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def test_a_private_step_sends_what_others_send(by_two: list[Found]) -> None:
    for of_rank in by_two:
        plain, private = of_rank["sent"][False], of_rank["sent"][True]
        assert {*private} == {*plain}, "operations of another kind"
        for name, count in plain.items():
            if "reduce_scatter" in name:  # in buckets, not module by module
                assert 0 < private[name] <= count
            else:
                assert private[name] == count, name
