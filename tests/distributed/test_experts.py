"""Experts in parallel, in two processes and in four: all have samples of their own, beside
``fully_shard`` over the same mesh."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import experts, processes, steps
from tests.distributed.processes import C, Found, truth_of


@pytest.mark.parametrize("name", experts.BY_TWO)
def test_sums_and_norms_are_those_of_single_samples(name: str, by_two: list[Found]) -> None:
    """Of every parameter too: LoRA's A and B, which the processes of a data mesh all have, count
    once."""
    assert max(of_rank[f"experts {name}"]["error"] for of_rank in by_two) <= 1e-12


@pytest.mark.parametrize("name", experts.BY_FOUR)
def test_so_they_are_over_data_and_experts(name: str, by_four: list[Found]) -> None:
    assert max(of_rank[f"experts {name}"]["error"] for of_rank in by_four) <= 1e-12


@pytest.mark.parametrize("name", experts.families())
def test_so_they_are_in_transformers(name: str, by_two: list[Found]) -> None:
    assert max(of_rank[f"experts of {name}"] for of_rank in by_two) <= 1e-6


@pytest.mark.parametrize("name", ["even", "LoRA", "two_pass, twice"])
def test_processes_stop_asking_each_other(name: str, by_two: list[Found]) -> None:
    assert all(of_rank[f"experts {name}"]["settled"] for of_rank in by_two)


def test_a_sample_that_is_not_finite_is_in_no_process_s_sums(by_two: list[Found]) -> None:
    assert max(of_rank["experts poisoned"] for of_rank in by_two) <= 1e-12


@pytest.mark.parametrize("disabled", ["", "before", "after"])
def test_ordinary_gradients_are_sums_over_samples(disabled: str, by_two: list[Found]) -> None:
    """Of a model that is not wrapped, and with hooks disabled before or after forward."""
    assert max(of_rank[f"experts ordinary {disabled}"] for of_rank in by_two) <= 1e-12


def test_training_is_that_of_one_process(by_two: list[Found], by_four: list[Found]) -> None:
    assert max(of_rank["experts trained"] for of_rank in by_two + by_four) <= 1e-9


def test_poisson_batches_are_of_the_whole_dataset(by_two: list[Found]) -> None:
    """Step by step against single samples."""
    drawn = [of_rank["experts engine"]["drawn"] for of_rank in by_two]
    ids, y, _ = steps.Rows(copies=3).tensors
    model = processes.make(**experts.NET)
    for own, other in zip(*drawn, strict=True):
        if index := own + other:
            processes._TRUTHS.clear()
            clipped = truth_of(model, ids[index], y[index]).clipped(C)
            for name, param in model.named_parameters():
                param.data -= 0.5 * clipped[name] / 2
    for of_rank in by_two:
        for name, param in model.named_parameters():
            found = of_rank["experts engine"]["end"][name]
            torch.testing.assert_close(found, param.detach(), rtol=1e-9, atol=1e-12)


def test_noise_is_drawn_once_for_every_element(by_four: list[Found]) -> None:
    """Processes are (data, expert) = (0, 0), (0, 1), (1, 0), (1, 1)."""
    noise = [of_rank["experts noise"] for of_rank in by_four]
    assert all(of_rank["drawn"] == of_rank["own"] for of_rank in noise)
    shards = [of_rank["steps"][0] for of_rank in noise]
    for mine, replica in ((0, 2), (1, 3)):
        torch.testing.assert_close(shards[mine], shards[replica], rtol=1e-4, atol=1e-5)
    n = min(map(len, shards[:2]))
    correlation = torch.corrcoef(torch.stack([shards[0][:n], shards[1][:n]]))[0, 1]
    assert abs(correlation) < 5 / n**0.5


REFUSED = {
    "without fully_shard": r"mixture.experts: found experts in parallel.*\n    fully_shard\(",
    "adapters": "mlp.experts.*found adapters around experts",
    "late adapters": "mlp.experts.*some lie in parts over a mesh",
    "not finite": "mlp.experts: found experts that give what is not finite",
    "odd": "found 3 experts and 2 processes.*divides 3",
    "no experts": "Net: found no experts",
    "late": "mixture.experts: found parameters on the meta device, or DTensors",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name: str, by_two: list[Found]) -> None:
    for of_rank in by_two:
        with pytest.raises(AssertionError, match=REFUSED[name]):
            raise AssertionError(of_rank[f"experts refuse {name}"])
