"""Experts in parallel, in two processes and in four: all have samples of their own, beside
``fully_shard`` over the same mesh."""

from __future__ import annotations

import torch

from tests.distributed import experts, processes, steps
from tests.distributed.processes import C, Found, truth_of


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
    "two passes": r"Net: found mode='two_pass' and experts in parallel.*\n    mode=\"one_pass\"",
    "adapters": "mlp.experts.*found adapters around experts",
    "late adapters": "mlp.experts.*some lie in parts over a mesh",
    "not finite": "mlp.experts: found experts that give what is not finite",
    "odd": "found 3 experts and 2 processes.*divides 3",
    "no experts": "Net: found no experts",
    "late": "mixture.experts: found parameters on the meta device, or DTensors",
}
