"""Batches in parts that fit: what ran out of memory is run again in halves, and a step is the same.

Compared with runs that never ran out: the same batches, the same noise, the same accounting, and
parameters that differ by the order of a sum alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import AdaptiveBound, FlashPrivacyEngine, MicroBatches, Users
from tests.support.errors import raises
from tests.support.faults import Fault, spread
from tests.support.private import TwoLayers, data, made

pytestmark = [
    pytest.mark.filterwarnings("ignore::flash_clipping.SeededNoiseWarning"),
]

#: A sum of float64 in another order.
TOLERANCE = 1e-12


class Small(TwoLayers):
    """Runs out of memory above so many samples: in forward, or in the backward of its first layer,
    when clipping has what it needs of the others."""

    def __init__(self, most: int, in_backward: bool = False) -> None:
        super().__init__()
        self.most, self.in_backward, self.sizes = most, in_backward, []

    def forward(self, x: Tensor) -> Tensor:
        def check(x: Any) -> None:
            if len(x) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        if torch.is_grad_enabled():
            self.sizes.append(len(x))
        h = self.body(x)
        if self.in_backward and h.requires_grad:
            h.register_hook(check)
        elif not self.in_backward:
            check(x)
        return self.head(h)


class Training:
    """Two epochs, or one, of Poisson batches with noise, from a seed."""

    def __init__(self, model: nn.Module | None = None, epochs: int = 1, **options: Any):
        torch.manual_seed(0)
        self.plain = (model or TwoLayers()).double()
        for param, seed in zip(self.plain.parameters(), range(9), strict=False):
            generator = torch.Generator().manual_seed(seed)
            param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64) / 3
        self.engine = FlashPrivacyEngine(accountant="rdp", seed=5)
        x, y = data().tensors
        loader = DataLoader(TensorDataset(x.double(), y), batch_size=16)
        options |= {"optimizer": torch.optim.Adam(self.plain.parameters(), 0.01)}
        options |= {"noise_multiplier": 0.5, "max_grad_norm": 0.1}
        private = made(self.plain, loader, self.engine, **options)
        self.model, self.optimizer, self.criterion, self.loader = private
        self.epochs = epochs

    def backward(self, x: Tensor, y: Tensor) -> float:
        loss = self.criterion(self.model(x), y)
        loss.backward()
        return float(loss.loss_per_sample.sum())

    def plainly(self) -> Training:
        for _ in range(self.epochs):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                self.backward(x, y)
                self.optimizer.step()
        return self

    def in_parts(self, **options: Any) -> MicroBatches:
        micro_batches = MicroBatches(self.optimizer, **options)
        for _ in range(self.epochs):
            for x, y in self.loader:
                micro_batches(self.backward, x, y)
                self.optimizer.step()
        return micro_batches

    def check(self, expected: Training) -> None:
        """Parameters, accounting, and how much noise was drawn are those of another training."""
        pairs = zip(self.plain.parameters(), expected.plain.parameters(), strict=True)
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)
        assert self.engine.accountant.history == expected.engine.accountant.history
        assert self.optimizer.stream.state_dict() == expected.optimizer.stream.state_dict()
        assert self.loader.batch_sampler.drawn == expected.loader.batch_sampler.drawn


@functools.cache
def whole(epochs: int) -> Training:
    """A training of whole batches, which all of those in parts are compared with."""
    return Training(epochs=epochs).plainly()


@pytest.mark.filterwarnings("error::flash_clipping.NotPoissonWarning")
@pytest.mark.parametrize(
    ("most", "in_backward"),
    [(1, True), (3, False), (3, True), (8, False), (15, True), (100, False)],
)
def test_a_training_that_runs_out_of_memory(most: int, in_backward: bool) -> None:
    training = Training(Small(most, in_backward), epochs=2)
    found = training.in_parts()
    training.check(whole(epochs=2))
    limit = found.max_physical_batch_size
    if most == 100:
        assert limit == "auto"
    else:
        assert isinstance(limit, int) and most / 2 <= limit <= most
    # What does not fit is tried once, and no part again.
    small = training.plain
    tried = [size for size in small.sizes if size > most]
    assert sorted(tried, reverse=True) == tried and len(tried) == len(set(tried))


@pytest.mark.parametrize("size", [1, 5, 16])
def test_parts_of_a_size_that_is_given(size: int) -> None:
    training = Training(Small(100))
    assert training.in_parts(max_physical_batch_size=size).max_physical_batch_size == size
    training.check(whole(epochs=1))
    assert max(training.plain.sizes) <= max(size, 2)  # the proof runs two samples


@pytest.mark.parametrize(
    ("mode", "clipping"), [("one_pass", AdaptiveBound(0.5, 0.01, 1.0)), ("two_pass", "flat")]
)
def test_out_of_memory_at_operators_of_a_step(mode: str, clipping: Any) -> None:
    """Wherever forward and backward run out, what they have left is not in the sum."""
    options: dict[str, Any] = {"mode": mode, "clipping": clipping}

    def step(training: Training, batch: tuple[Tensor, Tensor], fault: Fault) -> Any:
        def run(x: Tensor, y: Tensor) -> None:
            with fault:
                training.criterion(training.model(x), y).backward()

        micro_batches = MicroBatches(training.optimizer, max_physical_batch_size=6)
        micro_batches(run, *batch)
        training.optimizer.step()
        return micro_batches

    x, y = data().tensors
    batches = [(x[:12].double(), y[:12]), (x[12:20].double(), y[12:20])]
    counts, expected = [], Training(**options)
    for batch in batches:
        counter = Fault(-1, None)
        step(expected, batch, counter)
        counts.append(counter.count)
    proofs = [at for at in spread(*counts, rehearsed=2, own=40) if at < counts[0] - counts[1]]
    halved, own = 0, 40
    for at in proofs:
        training = Training(**options)
        for batch, first in zip(batches, (at, -1), strict=True):
            fault = Fault(first, torch.OutOfMemoryError("injected"))
            halved += step(training, batch, fault).max_physical_batch_size != 6
        training.check(expected)
    # Where nothing is proven any more, every step of a training runs out at another place.
    for half in range(2):
        expected, training = Training(**options), Training(**options)
        for number in (None, *range(half, own, 2)):
            batch, counter = batches[number is not None], Fault(-1, None)
            step(expected, batch, counter)
            at = -1 if number is None else number * counter.count // own
            fault = Fault(at, torch.OutOfMemoryError("injected"))
            halved += step(training, batch, fault).max_physical_batch_size != 6
            training.check(expected)
    assert halved >= own * 4 // 5  # looks and audits try other batches


def test_where_no_sample_fits() -> None:
    training = Training(Small(0))
    with pytest.raises(torch.OutOfMemoryError) as error:
        training.in_parts()
    assert not getattr(error.value, "__notes__", None)
    assert training.engine.accountant.history == []


def test_what_failed_is_in_no_later_step() -> None:
    """Also of a step without parts, and of samples that no loader knows."""
    training = Training()
    x, y = (part[:8].clone() for part in data().tensors)
    micro_batches = MicroBatches(training.optimizer, max_physical_batch_size=4)

    def failing(x: Tensor, y: Tensor, calls: list[int] = []) -> None:  # noqa: B006
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("mine")
        training.backward(x.double(), y)

    with pytest.raises(ValueError, match="mine"):
        micro_batches(failing, x, y)
    training.optimizer.zero_grad()
    training.backward(x.double(), y)
    once = [param.grad.clone() for param in training.plain.parameters()]
    training.optimizer.accumulate()
    for summed, grad in zip(training.optimizer._sums(), once, strict=True):
        assert torch.equal(summed, grad)


@dataclass(frozen=True)
class Batch:
    x: Tensor
    names: list[str]
    scale: float


@pytest.mark.parametrize(
    "pack",
    [
        lambda x: {"x": x, "names": [*map(str, range(len(x)))], "scale": 2.0},
        lambda x: Batch(x, [*map(str, range(len(x)))], 2.0),
    ],
    ids=["mapping", "object"],
)
def test_batches_of_any_kind(pack: Callable[[Tensor], Any]) -> None:
    training, seen = Training(), []

    def run(batch: Any) -> None:
        batch = vars(batch) if isinstance(batch, Batch) else batch
        seen.append(batch["names"])
        training.model(batch["scale"] * batch["x"]).square().sum(1).mean().backward()

    MicroBatches(training.optimizer, max_physical_batch_size=2)(
        run, pack(data().tensors[0][:5].double())
    )
    assert seen == [["0", "1"], ["2", "3"], ["4"]]


def test_batches_that_cannot_be_cut() -> None:
    training = Training()
    micro_batches = MicroBatches(training.optimizer, max_physical_batch_size=2)
    x, y = data().tensors
    for batch in ([x[:5], y[:4]], [x[:5], torch.ones(())], []):
        with raises("FC545"):
            micro_batches(training.backward, *batch)


def test_what_must_come_whole_is_refused() -> None:
    units = Training(unit=Users(torch.arange(64) // 2))
    with raises("FC546", match="must come whole"):
        MicroBatches(units.optimizer)
    stage, shards = SimpleNamespace(_module=Training().model), Training().optimizer
    shards._sharded = SimpleNamespace()
    for several in (stage, shards):
        with raises("FC546", match="found shards or stages, whose processes"):
            MicroBatches(several)
    with raises("FC319", ValueError, match="found Adam"):
        MicroBatches(torch.optim.Adam(nn.Linear(2, 2).parameters()))
    for size in (0, True, 1.5, "all"):
        with raises("FC302", ValueError, match=r"max_physical_batch_size: found .*\n.*=\"auto\""):
            MicroBatches(Training().optimizer, max_physical_batch_size=size)


def test_parts_of_another_are_no_batches() -> None:
    training = Training()
    micro_batches = MicroBatches(training.optimizer)
    manager = BatchMemoryManager(
        data_loader=training.loader, max_physical_batch_size=4, optimizer=training.optimizer
    )
    with (
        manager as parts,
        raises("FC547"),
    ):
        for x, y in parts:
            micro_batches(training.backward, x, y)
    assert training.engine.accountant.history == []


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_loop_that_cannot_begin_anew_says_what_to_paste(in_backward: bool) -> None:
    training = Training(Small(2, in_backward))
    x, y = next(iter(training.loader))
    with pytest.raises(torch.OutOfMemoryError) as error:
        training.backward(x, y)
    (note,) = error.value.__notes__
    names = {"optimizer": training.optimizer, "criterion": training.criterion}
    names |= {
        "model": training.model,
        "x": x,
        "y": y,
        "flash_clipping": __import__("flash_clipping"),
    }
    code = "\n".join(line.strip() for line in note.splitlines() if line.startswith("    "))
    exec(code, names)
    training.optimizer.step()
    assert len(training.engine.accountant.history) == 1


@pytest.mark.gpu
def test_memory_of_a_gpu_that_runs_out() -> None:
    """A limit on the process in place of a full device. What failed lets go of all its memory, or
    half of it would not fit; equal, bit for bit, to a training that is told the size."""
    torch.cuda.empty_cache()
    limit = 600 * 2**20 + torch.cuda.memory_reserved()
    found, trained = [], []
    size: int | str = "auto"
    for _ in range(2):
        torch.manual_seed(0)
        layers = [m for _ in range(8) for m in (nn.Linear(256, 256), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(256, 3)).cuda()
        ids = TensorDataset(torch.arange(64), torch.arange(64) % 3)
        made = FlashPrivacyEngine(accountant="rdp", seed=5).make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            data_loader=DataLoader(ids, batch_size=64),
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=0.5,
            max_grad_norm=0.1,
        )
        private, optimizer, criterion, loader = made

        def backward(ids: Tensor, y: Tensor, private: Any = private, loss: Any = criterion) -> None:
            x = torch.ones(len(ids), 1024, 256, device="cuda") * (ids / 64).cuda()[:, None, None]
            loss(private(x).mean(1), y.cuda()).backward()

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)
        try:
            micro_batches = MicroBatches(optimizer, max_physical_batch_size=size)
            for _ in range(2):
                for batch in loader:
                    micro_batches(backward, *batch)
                    optimizer.step()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        size = micro_batches.max_physical_batch_size
        found.append(size)
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert found[0] == found[1] and isinstance(size, int) and 8 <= size < 64
    assert torch.equal(*trained)
