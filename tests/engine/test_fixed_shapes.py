"""``PoissonSampling(max_batch_size=...)``: batches of one size, cut or filled up, and accounted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import AdaptiveBound, Documents, FlashPrivacyEngine, PoissonSampling, Users
from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.noise.process import FixedShapeSampler
from flash_clipping.randomness import SecretStream
from flash_clipping.trainers.dashboard import ClippingStatistics
from tests.support.errors import raises
from tests.support.graphs import PlayedByHand
from tests.support.oracle import assert_close
from tests.support.private import TwoLayers, data, made

pytest.importorskip("dp_accounting")
SIZE, BATCH, ROWS = 64, 8, 9


def private(**options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    engine = options.pop("engine", None) or FlashPrivacyEngine(accountant="pld")
    model = options.pop("model", None) or TwoLayers().double()
    x, y = data(SIZE).tensors
    dataset = TensorDataset(x.double() / 30, y, torch.arange(SIZE))
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=options.pop("workers", 0))
    options = {"noise_multiplier": 0.0, "max_grad_norm": 0.3} | options
    options = {"mechanism": PoissonSampling(max_batch_size=ROWS)} | options
    options |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.0)}
    return engine, model, *made(model, loader, engine, **options)


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[list[Tensor]]:
    """Of every sample by itself."""
    plain = TwoLayers().double()
    plain.load_state_dict(model.state_dict())
    params = list(plain.parameters())
    return [
        list(torch.autograd.grad(cross_entropy(plain(x[i : i + 1]), y[i : i + 1]), params))
        for i in range(len(x))
    ]


def truth(model: nn.Module, x: Tensor, y: Tensor, bound: float) -> list[Tensor]:
    """Clipped sums."""
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for grads in gradients(model, x, y):
        norm = float(torch.cat([g.flatten() for g in grads]).norm())
        for total, g in zip(sums, grads, strict=True):
            total += g * min(1.0, bound / (norm + 1e-6))
    return sums


def partly_padded(module: Any, loader: Any) -> tuple[Tensor, Tensor, int]:
    """A batch of which some rows count."""
    loader.batch_sampler._sample_rate = 0.06
    for x, y, _ in loader:
        count = module._session.rows.draws.waiting[-1].samples
        if 1 < count < ROWS - 1:
            return x, y, count
        with torch.no_grad():
            module(x)
    raise AssertionError


# -- what is drawn ---------------------------------------------------------------------------------


def sampler(rows: int, rate: float = 0.3, count: int = 20, steps: int = 3000) -> FixedShapeSampler:
    return FixedShapeSampler(
        num_samples=count,
        sample_rate=rate,
        steps=steps,
        max_batch_size=rows,
        stream=SecretStream(key=bytes(32)),
    )


def test_batches_are_truncated_poisson_batches() -> None:
    """As dp-accounting's event has it: a Poisson batch, of which a random subset is left."""
    stats = pytest.importorskip("scipy.stats")
    rows, rate, count, steps = 6, 0.3, 20, 3000
    sizes: Counter[int] = Counter()
    seen = np.zeros(count)
    drawing = sampler(rows, rate, count, steps)
    for batch in drawing:
        assert len(batch) == len(set(batch)) == rows
        kept = drawing.pending.popleft().samples
        sizes[kept] += 1
        seen[batch[:kept]] += 1
    expected = steps * stats.binom.pmf(np.arange(rows + 1), count, rate)
    expected[rows] = steps * stats.binom.sf(rows - 1, count, rate)
    observed = np.array([sizes[k] for k in range(rows + 1)])
    assert ((observed - expected) ** 2 / expected)[expected > 5].sum() < stats.chi2.ppf(1 - 1e-6, 6)
    share = seen.sum() / count
    assert ((seen - share) ** 2 / share).sum() < stats.chi2.ppf(1 - 1e-6, count)


@pytest.mark.parametrize("rows", [0, 21, True])
def test_sizes_that_cannot_be(rows: int) -> None:
    with raises("FC302", ValueError, match=r"max_batch_size: found .* in \[1, 20\]"):
        sampler(rows)


# -- what counts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_padding_adds_nothing(mode: str, workers: int) -> None:
    """Sums are those of the rows that count; batches without any, and full ones, are among them."""
    if workers and mode == "two_pass":
        pytest.skip("workers know nothing of it")
    _, model, module, optimizer, criterion, loader = private(mode=mode, workers=workers)
    stream, met = loader.batch_sampler, Counter[int]()
    stream._sample_rate = 0.03  # batches of all sizes
    for _ in range(1 if workers else 6):
        for x, y, _ in loader:
            count = module._session.rows.draws.waiting[-1].samples
            met[count] += 1
            assert len(x) == ROWS
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            for p, expected in zip(
                model.parameters(), truth(model, x[:count], y[:count], 0.3), strict=True
            ):
                assert_close(p.grad, expected, 1e-9, "sum")
            norms, coef = module.get_norm_sample(), module.get_clipping_coef()
            assert (norms[count:] == 0).all() and (coef[count:] == 0).all()
            assert (norms[:count] > 0).all() and (coef[:count] > 0).all()
            optimizer.step()
    assert workers or {0, 1, 2} <= met.keys()


@pytest.mark.parametrize("clipping", ["automatic", "per_layer"])
def test_every_way_to_clip_leaves_padding_out(clipping: str) -> None:
    bound: Any = [0.2] * 4 if clipping == "per_layer" else 0.3
    _, model, module, optimizer, criterion, loader = private(clipping=clipping, max_grad_norm=bound)
    x, y, count = partly_padded(module, loader)
    criterion(module(x), y).backward()
    found = [p.grad.clone() for p in model.parameters()]
    coef = module.get_clipping_coef()
    assert (coef[..., count:] == 0).all() and (coef[..., :count] > 0).all()
    sums = [torch.zeros_like(g) for g in found]
    for i, grads in enumerate(gradients(model, x[:count], y[:count])):
        for k, g in enumerate(grads):
            sums[k] += g * (coef[k, i] if coef.dim() == 2 else coef[i])
    for a, b in zip(found, sums, strict=True):
        assert_close(a, b, 1e-9, "sum")


def test_padding_is_no_sample_to_the_dashboard() -> None:
    _, _, module, optimizer, criterion, loader = private()
    statistics, expected = ClippingStatistics(module), 0
    for x, y, _ in loader:
        expected += module._session.rows.draws.waiting[-1].samples
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        statistics.note_backward()
        optimizer.step()
    reading = statistics.read()
    assert reading.samples == expected and reading.median_norm > 0


@pytest.mark.parametrize("alike", [False, True], ids=["rows differ", "rows are equal"])
def test_parts_of_a_batch_are_one_step(alike: bool) -> None:
    """Of ``BatchMemoryManager``: each part has its own padding, by its place in the batch."""
    engine, model, module, optimizer, criterion, loader = private()
    if alike:
        for x in loader.dataset.tensors[:2]:
            x[:] = x[0].clone()
    sizes = [0, 1, 2, 9, 7, 3, 4, 5]  # of 9 rows in 3 parts: those of the last end in 2 and 1
    sampler, draw = loader.batch_sampler, loader.batch_sampler._draw

    def drawn(number: int) -> tuple[list[int], DrawnBatch]:
        indices, batch = draw(number)
        return indices, replace(batch, samples=sizes[batch.number])

    sampler._draw = drawn
    kept: list[tuple[Tensor, Tensor]] = []
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer)
    with manager as parts:
        for x, y, _ in parts:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            counts = module.get_clipping_coef() > 0
            assert len(counts) == 3 and (counts[1:] <= counts[:-1]).all()
            kept.append((x[counts], y[counts]))
            optimizer.step()
            if not optimizer._is_last_step_skipped:
                assert len(kept) == 3
                assert sum(len(x) for x, _ in kept) == sizes[len(engine.accountant) - 1]
                x, y = (torch.cat(both) for both in zip(*kept, strict=True))
                for p, expected in zip(model.parameters(), truth(model, x, y, 0.3), strict=True):
                    assert_close(p.grad * BATCH, expected, 1e-9, "sum")
                kept = []
    assert len(engine.accountant) == len(sizes)


# -- several processes -----------------------------------------------------------------------------


def test_processes_have_parts_of_the_batch_of_one() -> None:
    """Of one key: rows that count, and rows in all, so that the accounting is that of one."""
    options = {"num_samples": 60, "sample_rate": 0.15, "steps": 40, "max_batch_size": 12}
    alone, *parts = (
        FixedShapeSampler(**options, **part, stream=SecretStream(key=bytes(32)))  # type: ignore[arg-type]
        for part in ({}, *({"rank": rank, "world_size": 3} for rank in range(3)))
    )
    counts = set()
    for whole, *own in zip(alone, *parts, strict=True):
        counted = [sampler.last.samples for sampler in (alone, *parts)]
        assert [len(rows) for rows in own] == [4, 4, 4] and counted[0] == sum(counted[1:])
        assert sorted(sum(own, [])) == sorted(whole)
        assert {i for rows, n in zip(own, counted[1:], strict=True) for i in rows[:n]} == {
            *whole[: counted[0]]
        }
        counts.add(max(counted[1:]) - min(counted[1:]))
        assert max(counts) <= 1
    assert counts == {0, 1}


def test_a_bound_that_processes_cannot_share_is_refused() -> None:
    with raises("FC337", ValueError, match=r"10.*4 proc.*\n    max_batch_size=8"):
        FixedShapeSampler(
            max_batch_size=10, num_samples=60, sample_rate=0.1, steps=3, rank=0, world_size=4
        )


# -- one shape -------------------------------------------------------------------------------------


def test_replays_read_the_mask_of_their_own_batch() -> None:
    """One graph for all batches, whatever was drawn."""

    def train(graphed: bool) -> tuple[list[Tensor], Any]:
        _, model, module, optimizer, _, loader = private(
            engine=FlashPrivacyEngine(accountant="pld")
        )
        loader.batch_sampler.stream = SecretStream(key=bytes(32))

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = cross_entropy(module(x), y)
            loss.backward()
            return loss

        take = PlayedByHand(step, module) if graphed else step
        found = []
        for x, y, _ in loader:
            optimizer.zero_grad()
            take(x, y)
            found += [p.grad.clone() for p in model.parameters()]
            found += [module.get_norm_sample().clone(), module.get_clipping_coef().clone()]
            optimizer.step()
        return found, take

    found, take = train(True)
    assert take.replays == 5
    for a, b in zip(found, train(False)[0], strict=True):
        assert torch.equal(a, b)


def test_parts_are_not_replayed() -> None:
    _, _, module, optimizer, _, loader = private()
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer)
    take = PlayedByHand(lambda x, y: cross_entropy(module(x), y).backward(), module)
    with manager as parts, raises("FC705", match="3 rows.* of 9"):
        for x, y, _ in parts:
            optimizer.zero_grad()
            take(x, y)
            optimizer.step()


# -- what is refused -------------------------------------------------------------------------------


def test_a_forward_of_another_batch_is_refused() -> None:
    _, _, module, optimizer, criterion, loader = private()
    x = data(SIZE).tensors[0].double()
    with raises("FC244"):
        module(x[:ROWS])
    for x, _, _ in loader:
        with raises("FC243", match="3.*9"):
            module(x[:3])
        break
    batches = iter(loader)
    ahead = next(batches)
    next(batches)  # as Accelerate and Lightning do
    with raises("FC243"):
        module(ahead[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "prv"}, "accountant='prv'"),
        ({"clipping": AdaptiveBound()}, "AdaptiveBound"),
        ({"unit": Users(torch.arange(SIZE) // 2)}, "with unit=Users"),
        ({"unit": Documents("index")}, "with unit=Documents"),
        ({"poisson_sampling": False}, "poisson_sampling=False"),
        ({"grad_sample_mode": "ghost"}, "grad_sample_mode"),
        ({"mechanism": PoissonSampling(max_batch_size=SIZE + 1)}, r"found 65; .* in \[1, 64\]"),
    ],
)
def test_what_is_not_accounted_for_is_refused(options: dict[str, Any], message: str) -> None:
    if "engine" in options:
        options = {"engine": FlashPrivacyEngine(accountant=options["engine"])}
    with raises("FC302|FC313|FC316", ValueError, match=message):
        private(**options)
