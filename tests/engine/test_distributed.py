"""Two processes with half of every batch each: the same training as one process with the whole.

Through Opacus' ``DifferentiallyPrivateDistributedDataParallel`` and its distributed optimizer, on
gloo over the loopback interface.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.optimizers import DistributedDPOptimizerFastGradientClipping
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from flash_clipping import (
    AdaptiveBound,
    FixedOrder,
    FlashPrivacyEngine,
    MicroBatches,
    PoissonSampling,
    RandomAllocation,
)
from flash_clipping.engine.grad_ledger import sensitivity_of
from flash_clipping.noise.mechanisms import BandedInverseNoise
from flash_clipping.ops.noise import noisy_means
from flash_clipping.randomness import Draw, Purpose
from tests.support.models import Block
from tests.support.starting import ByGloo, fixture_of
from tests.support.sums import note_sums

WORLD = 2
SAMPLES, BATCH = 64, 16  # BATCH over all processes
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch without gloo")

#: What is trained, by name; ``make_private``'s arguments and ours (see ``train``).
SCENARIOS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"loss_reduction": "sum"},
    "plain_loss": {"own_loss": True},
    "two_pass": {"mode": "two_pass"},
    "not_wrapped": {"wrap_model": False},
    "adamw": {"optimizer": "AdamW"},
    "virtual_steps": {"physical_batch": 3},
    "halved": {"fits": 3},
    "automatic": {"clipping": "automatic"},
    "per_layer": {"clipping": "per_layer"},
    "opacus_ghost": {"grad_sample_mode": "ghost"},
}
#: Random by process, so that there is no single process to compare with.
RANDOM: dict[str, dict[str, Any]] = {
    "noise": {"noise_multiplier": 1.0},
    "adaptive": {
        "clipping": AdaptiveBound(0.5, 1e-3, 10.0, clipbound_learning_rate=0.3),
        "noise_multiplier": 0.5,
    },
    "truncated": {
        "poisson_sampling": True,
        "mechanism": PoissonSampling(max_batch_size=20),
        "physical_batch": 4,
    },
    "correlated": {
        "poisson_sampling": True,
        "noise_multiplier": 1.0,
        "mechanism": FixedOrder(BandedInverseNoise(2)),
        "physical_batch": 3,
    },
    "allocated": {
        "poisson_sampling": True,
        "noise_multiplier": 1.0,
        "mechanism": RandomAllocation(),
        "steps": SAMPLES // BATCH,
        "physical_batch": 3,
    },
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = Block(8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(ids))).mean(1)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (SAMPLES, 5), generator=generator)
    return TensorDataset(ids, torch.randint(0, 3, (SAMPLES,), generator=generator))


def train(
    options: dict[str, Any], rank: int | None = None, engine: PrivacyEngine | None = None
) -> dict[str, Any]:
    """Some steps in one process of several, or in the only one (``rank=None``)."""
    options = dict(options)
    own_loss = options.pop("own_loss", False)
    physical_batch, fits = options.pop("physical_batch", None), options.pop("fits", None)
    optimizer_type = getattr(torch.optim, options.pop("optimizer", "SGD"))
    batch_size, steps = options.pop("batch", BATCH), options.pop("steps", 6)
    reduction = options.get("loss_reduction", "mean")
    lr = {"AdamW": 1e-2}.get(optimizer_type.__name__, 0.5 if reduction == "mean" else 0.5 / BATCH)

    torch.manual_seed(0 if rank is None else rank)  # process 0's parameters count
    model: nn.Module = Net().double()
    plain = model
    sampler = None
    if rank is not None:
        model = DifferentiallyPrivateDistributedDataParallel(model)
        sampler = DistributedSampler(data(), WORLD, rank, shuffle=False)
        batch_size //= WORLD
    bounds = [0.02] * len(list(model.parameters()))
    private = (engine or FlashPrivacyEngine()).make_private(
        module=model,
        optimizer=optimizer_type(model.parameters(), lr=lr),
        criterion=nn.CrossEntropyLoss(reduction=reduction),
        data_loader=DataLoader(data(), batch_size=batch_size, sampler=sampler),
        max_grad_norm=bounds if options.get("clipping") == "per_layer" else 0.1,
        **{"noise_multiplier": 0.0, "poisson_sampling": False, **options},
    )
    wrapper, optimizer, criterion, loader = private
    called = wrapper if options.get("wrap_model", True) else model
    steps_done, sizes, sums = 0, [], note_sums(optimizer)

    def backward(ids: Tensor, target: Tensor) -> None:
        loss = F.cross_entropy if own_loss else criterion
        output = called(ids)
        if fits is not None and len(ids) > fits and rank != 0:  # the others have memory enough
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss(output, target).backward()
        sizes.append(len(ids))

    while steps_done < steps and fits is not None:
        micro_batches = MicroBatches(optimizer)
        for ids, target in loader:
            micro_batches(backward, ids, target)
            optimizer.step()
            steps_done += 1
            if steps_done == steps:
                break
    while steps_done < steps:
        manager = BatchMemoryManager(
            data_loader=loader,
            max_physical_batch_size=physical_batch or BATCH,
            optimizer=optimizer,
        )
        with manager as batches:
            for ids, target in batches:
                optimizer.zero_grad()
                backward(ids, target)
                optimizer.step()
                steps_done += not optimizer._is_last_step_skipped
                if steps_done == steps:
                    break
    return {
        "parameters": {name: param.detach() for name, param in plain.named_parameters()},
        "distributed": isinstance(optimizer, DistributedDPOptimizerFastGradientClipping),
        "expected_batch_size": optimizer.expected_batch_size,
        "bound": optimizer.max_grad_norm,
        "sizes": sizes,
        # Of the last step, before and after noise.
        "clipped": torch.cat([summed.flatten() for summed in sums[-1]]),
        "noisy": torch.cat([p.grad.flatten() for p in optimizer.params]),
    }


def find(rank: int) -> dict[str, Any]:
    results = {}
    for name, options in (SCENARIOS | RANDOM).items():
        engine = FlashPrivacyEngine(accountant="pld" if "mechanism" in options else "rdp")
        results[name] = train(options, rank, engine)
        results[name]["key"] = engine.stream.draw(Purpose.NOISE).key
        results[name]["history"] = list(engine.accountant.history)
    return results


trained_by_two = fixture_of(ByGloo("trained_by_two", lane=1, find=find, world=WORLD))


@pytest.fixture
def processes(trained_by_two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What every process found in every scenario."""
    return trained_by_two


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_equal_one(name: str, processes: list[dict[str, Any]]) -> None:
    engine = FlashPrivacyEngine(accountant="rdp")
    alone = train(SCENARIOS[name], engine=engine)
    start = dict(Net().named_parameters())
    for rank in range(WORLD):
        found = processes[rank][name]
        assert found["distributed"] and not alone["distributed"]
        assert found["expected_batch_size"] == alone["expected_batch_size"] / WORLD == BATCH / WORLD
        assert found["history"] == engine.accountant.history
        for parameter, value in alone["parameters"].items():
            torch.testing.assert_close(found["parameters"][parameter], value, rtol=1e-9, atol=1e-12)
            assert not torch.allclose(value.float(), start[parameter], atol=1e-4)
    assert sum(sum(processes[rank][name]["sizes"]) for rank in range(WORLD)) == sum(alone["sizes"])


@pytest.mark.parametrize("name", [*SCENARIOS, *RANDOM])
def test_processes_stay_together(name: str, processes: list[dict[str, Any]]) -> None:
    first, second = (found[name]["parameters"] for found in processes)
    for parameter, value in first.items():
        assert torch.equal(second[parameter], value), parameter
    assert processes[0][name]["history"] == processes[1][name]["history"]


def test_adaptive_bound_is_one_for_all(processes: list[dict[str, Any]]) -> None:
    assert processes[0]["adaptive"]["bound"] == processes[1]["adaptive"]["bound"]


def test_noise_is_added_once(processes: list[dict[str, Any]]) -> None:
    """std sigma C (1 + ETA) over the sum of all processes: not once by each of them."""
    stats = pytest.importorskip("scipy.stats")
    clipped = sum(found["noise"]["clipped"] for found in processes)
    noise = (processes[0]["noise"]["noisy"] * BATCH - clipped) / sensitivity_of(0.1)
    tail = stats.chi2.cdf(noise.square().sum().item(), len(noise))
    assert 1e-4 < tail < 1 - 1e-4, noise.std()


def test_correlated_noise_is_that_of_the_first_process(processes: list[dict[str, Any]]) -> None:
    """It draws for all, whose parts of a batch are in a fixed order, in parts of their own."""
    first, second = (found["correlated"] for found in processes)
    assert first["sizes"] == second["sizes"] == [3, 3, 2] * 6  # a half of 16, step by step
    noise = first["noisy"] * BATCH - first["clipped"] - second["clipped"]
    noise /= sensitivity_of(0.1)
    nothing = [torch.zeros_like(param) for param in Net().double().parameters()]
    drawn = []
    for number in (4, 5):  # the last two of six steps
        draw = Draw(first["key"], Purpose.NOISE, number)
        drawn.append(torch.cat([z.flatten() for z in noisy_means(nothing, 1.0, 1.0, draw=draw)]))
    before, last = drawn
    torch.testing.assert_close(noise, last - 0.5 * before, rtol=0, atol=1e-9)


def test_truncated_batches_have_one_shape(processes: list[dict[str, Any]]) -> None:
    """20 rows of both processes together."""
    for found in processes:
        assert found["truncated"]["sizes"] == [4, 3, 3] * 6


def test_random_allocation_has_every_sample_in_one_step_of_one_process(
    processes: list[dict[str, Any]],
) -> None:
    assert sum(sum(found["allocated"]["sizes"]) for found in processes) == SAMPLES
    steps = SAMPLES // BATCH
    assert processes[0]["allocated"]["history"] == [(1.0, 1 / steps, steps)]
