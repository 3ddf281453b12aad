"""What runs in every process besides sums: training, noise, sampling, saving, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, distributed as dist, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import (
    AdaptiveBound,
    Documents,
    FixedOrder,
    FlashDPOptimizer,
    FlashPrivacyEngine,
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
    Users,
)
from flash_clipping.distributed.parameter_slots import local_of
from flash_clipping.engine.grad_ledger import sensitivity_of
from flash_clipping.engine.private_state import PrivateState
from flash_clipping.noise.mechanisms import NoiseMechanism
from flash_clipping.ops.noise import noisy_means
from flash_clipping.randomness import Draw, Purpose
from flash_clipping.randomness.chacha import Keystream
from tests.distributed.processes import (
    SAMPLES,
    VOCAB,
    C,
    Parts,
    all_of,
    batch,
    device,
    error,
    errors_of_sums,
    freeze,
    local,
    make,
    message,
    sharded,
    truth_of,
)
from tests.support import packed
from tests.support.autograd import truth_by_autograd
from tests.support.draws import drawn as drawn_by
from tests.support.oracle import Truth
from tests.support.sums import note_sums

ADAPTIVE = AdaptiveBound(min_clipbound=1e-3, max_clipbound=10.0)


def everyone() -> tuple[int, ...]:
    """Cuts of the batch into as many parts as there are processes, of unequal sizes."""
    world = dist.get_world_size()
    return (0, *(SAMPLES * (i + 1) // world for i in range(world - 1)), SAMPLES)


def sgd(model: nn.Module, lr: float) -> torch.optim.SGD:
    """On a GPU, PyTorch's ``foreach`` takes no parameters of which some are cut, and some not."""
    return torch.optim.SGD(model.parameters(), lr=lr, foreach=False)


def optimizer_of(model: nn.Module, flash: Any, noise: float, samples: int = SAMPLES) -> Any:
    """SGD for a wrapped model, with shards or without; ``samples`` are expected in a batch."""
    return _optimizer_of(sgd(model, 1e-2), flash, noise, samples)


def _optimizer_of(plain: Any, flash: Any, noise: float, samples: int) -> Any:
    numbers: Any = {"noise_multiplier": noise, "max_grad_norm": C, "expected_batch_size": samples}
    optimizer = FlashDPOptimizer(plain, **numbers)
    optimizer.follow(flash)
    return optimizer


def end_of_training(
    model: Any, loss_of: Callable[[Any], Tensor], samples: int, wrap: bool = True, **options: Any
) -> dict[str, Tensor]:
    """The parameters after three steps by AdamW without noise."""
    cls: Any = GradSampleModuleFlashClipping if wrap else GradSampleHooksFlashClipping
    flash = cls(model, max_grad_norm=C, **options)
    optimizer = _optimizer_of(torch.optim.AdamW(model.parameters(), lr=1e-2), flash, 0.0, samples)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(flash if wrap else model).backward()
        optimizer.step()
    return {name: all_of(param).detach() for name, param in model.named_parameters()}


def trained(
    rank: int, shards: dict[str, Any], net: dict[str, Any] | None = None, **options: Any
) -> float:
    """Training of all processes differs from that of one with the whole batch by ..."""

    def end(model: Any, ids: Tensor, y: Tensor) -> dict[str, Tensor]:
        return end_of_training(model, lambda m: F.cross_entropy(m(ids), y), SAMPLES, **options)

    found = end(sharded(make(**(net or {})), **shards), *local(rank, everyone()))
    alone = end(make(**(net or {})), *batch())
    return max(error(found[name], alone[name]) for name in alone)


@contextmanager
def counted_blocks() -> Iterator[list[int]]:
    """How many blocks of ChaCha (8 numbers each) every draw of noise inside takes."""
    drawn: list[int] = []
    fill = Keystream.fill

    def noted(keystream: Keystream, words_N16: Tensor) -> None:
        drawn.append(len(words_N16))
        fill(keystream, words_N16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keystream, "fill", noted)
        yield drawn


def noise_of(
    optimizer: Any, params: dict[str, Any], backward: Callable[[], Any], samples: int = SAMPLES
) -> tuple[dict[str, Tensor], int]:
    """Noise of a step in units of its standard deviation, by parameter; blocks of it drawn."""
    optimizer.zero_grad()
    backward()
    sums = {name: local_of(p.grad).clone() for name, p in params.items()}
    with counted_blocks() as drawn:
        optimizer.step()
    std = 5 * sensitivity_of(C)
    noise = {n: (local_of(p.grad) * samples - sums[n]) / std for n, p in params.items()}
    return noise, sum(drawn)


def blocks_of(noise: dict[str, Tensor]) -> int:
    return sum(-(-x.numel() // 8) for x in noise.values())


def flat(noise: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in noise.values()])


def noisy(rank: int, shards: dict[str, Any], net: dict[str, Any] | None = None) -> dict[str, Any]:
    """Noise of two steps, of this process's shards; blocks of it drawn."""
    torch.manual_seed(0)  # all processes alike: that must not matter
    model = sharded(make(**(net or {})), **shards)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=C)
    optimizer = optimizer_of(model, flash, 5.0)
    ids, y = local(rank, everyone())
    steps = []
    for _ in range(2):
        noise, drawn = noise_of(
            optimizer,
            dict(model.named_parameters()),
            lambda: F.cross_entropy(flash(ids), y).backward(),
        )
        steps.append(flat(noise).float())
    other = sharded(make(**(net or {})), **shards)
    another = optimizer_of(other, GradSampleModuleFlashClipping(other, max_grad_norm=C), 5.0)
    return {
        "steps": steps,
        "drawn": drawn,
        "own": blocks_of(noise),
        "keys": [each.stream.state_dict() for each in (optimizer, another)],
    }


def check_independent(draws: list[Tensor]) -> None:
    """Standard normals, of steps and shards that have nothing in common."""
    both = torch.cat(draws)
    assert abs(both.std() - 1) < 5 / (2 * len(both)) ** 0.5
    assert abs(both.mean()) < 5 / len(both) ** 0.5
    n = min(map(len, draws))
    for i, one in enumerate(draws):  # from one state the first numbers would be the same
        assert all(torch.isclose(one[:n], two[:n], rtol=1e-4).sum() < 4 for two in draws[:i])
    others = torch.corrcoef(torch.stack([one[:n] for one in draws])) - torch.eye(len(draws))
    assert others.abs().max() < 5 / n**0.5, "shards, or steps, have the same noise"


class Rows(TensorDataset):
    """The batch, with the number of every sample."""

    def __init__(self, copies: int = 1) -> None:
        ids, y = (x.cpu() for x in batch())
        rows = torch.arange(copies * SAMPLES)
        super().__init__(ids.repeat(copies, 1), y.repeat(copies), rows)


def in_parts(loader: Any, optimizer: Any, part: int) -> Any:
    return BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=part, optimizer=optimizer
    ).__enter__()


#: The unit of every row of ``Rows(copies=3)``: eleven, of one to four rows that lie apart.
UNITS = [(row * row + row // 5) % 12 * 10**6 for row in range(24)]


def views(ids: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two rows of every item, and whose they are."""
    return torch.cat([ids, ids.flip(1)]), y.repeat(2), torch.arange(len(ids)).repeat(2)


def engine_run(
    shards: dict[str, Any] | None, net: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """One epoch by Poisson batches, all processes seeded alike. ``shards=None``: Opacus' data
    parallelism. With ``Documents`` items are two rows each."""
    torch.manual_seed(0)
    plain = make(**(net or {}))
    model = DPDDP(plain) if shards is None else sharded(plain, **shards)
    criterion = nn.CrossEntropyLoss()

    def backward(flash: Any, ids: Tensor, y: Tensor) -> None:
        named = {}
        if options.get("unit") == Documents("item"):
            ids, y, named["item"] = views(ids, y)
        criterion(flash(ids, **named), y).backward()

    return epoch(model, Rows(copies=3), backward, **options)


def epoch(
    model: Any,
    data: Any,
    backward: Callable[[Any, Tensor, Tensor], Any],
    *,
    part: int | None = None,
    batch_size: int = 2,
    seed: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """One epoch of a model by Poisson batches; in parts of so many samples. ``seed``: the engine's,
    the same in all processes."""
    accountant = "pld" if "mechanism" in options else "rdp"
    engine = FlashPrivacyEngine(accountant=accountant, seed=seed)
    wrapped, optimizer, _, loader = engine.make_private(
        module=model,
        optimizer=sgd(model, 0.5),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=batch_size),
        **{"noise_multiplier": 0.0, "max_grad_norm": C} | options,
    )
    if part is not None:
        loader = in_parts(loader, optimizer, part)
    drawn: list[list[int]] = [[]]  # rows of steps
    counted: list[list[int]] = [[]]  # those that are no padding
    sizes: list[list[int]] = [[]]  # of parts
    bounds = []
    for ids, y, row in loader:
        optimizer.zero_grad()
        backward(wrapped, ids.to(device()), y.to(device()))
        counted[-1] += row[: drawn_by(wrapped)].tolist()
        if "mechanism" not in options:  # without a row of nobody
            row = row[: len(row) * bool(drawn_by(wrapped))]
        optimizer.step()
        drawn[-1] += row.tolist()
        sizes[-1].append(len(row))
        if not optimizer._is_last_step_skipped:
            bounds.append(optimizer.max_grad_norm)
            for steps in (drawn, counted, sizes):
                steps.append([])
    shards, one = wrapped._sharded, torch.ones((), device=device())
    return {
        "drawn": drawn[:-1],
        "sizes": sizes[:-1],
        "counted": counted[:-1],
        "process": getattr(engine.accountant, "process", None),
        "bounds": bounds,
        "expected": optimizer.expected_batch_size,
        "history": engine.accountant.history,
        "processes": 1 if shards is None else int(shards.processes.reduce(one, samples=True)),
        "end": {
            name.removeprefix("module."): all_of(p).detach().clone()
            for name, p in model.named_parameters()
        },
    }


def descend(model: nn.Module, drawn: list[list[int]], truth: Callable[[list[int]], Truth]) -> None:
    """Steps of 0.5 on the clipped sums of these batches, of 2 expected samples."""
    for index in filter(None, drawn):
        clipped = truth(index).clipped(C)
        for name, param in model.named_parameters():
            param.data -= 0.5 * clipped[name] / 2


def check_sums(
    runs: list[dict[str, Any]], drawn: list[list[int]], net: dict[str, Any] | None = None
) -> None:
    """Beside one process that has all samples of every batch, one by one."""
    ids, y, _ = Rows(copies=3).tensors
    model = make(**(net or {}))
    descend(model, drawn, lambda index: truth_of(model, ids[index], y[index]))
    for run in runs:
        assert run["expected"] == 2
        assert run["history"] == [(0.0, pytest.approx(1 / 12), 12)]
        for name, value in run["end"].items():  # a stage has some of them
            expected = model.get_parameter(name).detach()
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


def by_loss(loss_of: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor, Tensor], None]:
    return lambda flash, ids, y: loss_of(flash(ids), y).backward()  # type: ignore[no-untyped-call]


def correlated(
    model: Any,
    noise: NoiseMechanism,
    backward: Callable[[Any, Tensor, Tensor], Any] = by_loss(F.cross_entropy),  # noqa: B008
    data: Any = None,
    part: int | None = None,
    load: str = "",
    save: str = "",
    **options: Any,
) -> dict[str, Any]:
    """An epoch of four batches in a fixed order: the noise of every step in units of its standard
    deviation, where it lies in the parameters, and what it was drawn with. In parts of so many
    samples; from a checkpoint in ``load``, to one in ``save``."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    engine = FlashPrivacyEngine(accountant="pld")
    data = Rows() if data is None else data
    flash, optimizer, _, loader = engine.make_private(
        module=model,
        optimizer=sgd(model, 0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=len(data) // 4),
        noise_multiplier=5.0,
        max_grad_norm=C,
        mechanism=FixedOrder(noise),
        **options,
    )
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = note_sums(optimizer)
    state = {"run": PrivateState(engine, flash, optimizer)}
    if load:
        dcp.load(state, checkpoint_id=load, no_dist=True)
    added, drawn, rows = [], [], []
    for ids, y, row in loader if part is None else in_parts(loader, optimizer, part):
        optimizer.zero_grad()
        backward(flash, ids.to(device()), y.to(device()))
        optimizer.step()
        rows += row[: drawn_by(flash)].tolist()
        if optimizer._is_last_step_skipped:
            continue
        noise = {}
        for (name, p), summed in zip(named.items(), sums[-1], strict=True):
            own = local_of(p.grad) * optimizer.expected_batch_size - summed
            noise[name] = (own / (5 * sensitivity_of(C))).cpu()
        added.append(noise)
        drawn.append(rows)
        rows = []
    if save:
        dcp.save(state, checkpoint_id=save)
    shards = optimizer._shards() or [0] * len(named)
    places = {}
    for number, (name, p) in enumerate(named.items()):
        offset = (0,) * p.dim()
        if hasattr(p, "placements"):
            _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        places[name] = (tuple(p.shape), offset, (number, shards[number]))
    return {
        "added": added,
        "places": places,
        "key": optimizer.stream.draw(Purpose.NOISE).key,
        "drawn": drawn,
        "history": engine.accountant.history,
        "epsilon": engine.get_epsilon(1e-3),
    }


def check_correlated(noise: NoiseMechanism, runs: list[dict[str, Any]]) -> None:
    """What processes have added is the cut of what one process makes of the whole parameters'
    noise, drawn with their key: ``inv(C) Z``, in float64. Replicas have added the same."""
    steps = len(runs[0]["added"])
    assert all(run["key"] == runs[0]["key"] for run in runs)
    column = noise.column(steps)
    matrix = [[column[t - s] if t >= s else 0.0 for s in range(steps)] for t in range(steps)]
    inverse = torch.linalg.inv(torch.tensor(matrix, dtype=torch.float64))
    for name in {name for run in runs for name in run["places"]}:
        having = [run for run in runs if name in run["places"]]
        shape = having[0]["places"][name][0]
        z = torch.full((steps, *shape), torch.nan, dtype=torch.float64)
        own: dict[int, Any] = {}
        for run in having:
            _, offset, (tensor, shard) = run["places"][name]
            part = run["added"][0][name]
            cut = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            assert own.setdefault(shard, cut) == cut, "one number for two shards"
            nothing = [torch.zeros_like(part)]
            for step in range(steps):
                draw = Draw(run["key"], Purpose.NOISE, step)
                (z[(step, *cut)],) = noisy_means(
                    nothing, 1.0, 1.0, draw=draw, tensors=[tensor], shards=[shard]
                )
        assert not z.isnan().any(), f"{name}: an element without noise"
        assert sum(z[(0, *cut)].numel() for cut in own.values()) == z[0].numel(), name
        rows = torch.einsum("ts,s...->t...", inverse, z)
        for run in having:
            cut = own[run["places"][name][2][1]]
            for step, added in enumerate(run["added"]):
                torch.testing.assert_close(added[name], rows[(step, *cut)], rtol=0, atol=1e-9)


#: Which documents are in which part, in three steps: some have one, or a row without positions.
OF_DOCUMENTS = {
    1: ((0, 5), (0, 5)),
    2: ((0, 3, 5), (0, 4, 5), (0, 5, 5)),
    4: ((0, 1, 3, 4, 5), (0, 0, 2, 4, 5), (0, 3, 3, 3, 5)),
}


def reader() -> Any:
    """A model for packed documents, in whose attention and feed-forward layers can be cut."""
    torch.manual_seed(0)
    between = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    return packed.Reader(between).double().to(device())


def documents_in_rows(
    place: int,
    parts: int,
    prepare: Callable[[Any], Any],
    frozen: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, Any]:
    """Packed documents in so many parts, of which this process has one."""
    every = packed.documents((3, 5, 1, 4, 2))
    truth = packed.truth_of(freeze(reader().cpu(), frozen), [[*enumerate(every)]])
    model = prepare(freeze(reader(), frozen))
    flash = GradSampleModuleFlashClipping(
        model, max_grad_norm=C, loss_reduction="sum", unit=Documents("document"), **options
    )
    errors = []
    for cuts in OF_DOCUMENTS[parts]:
        flash.zero_grad(set_to_none=True)
        mine = slice(cuts[place], cuts[place + 1])
        some = every[mine] or every[:1]  # a row of nobody stands for none
        ids, places, numbers = packed.packed([[*enumerate(some)]])
        # On a GPU nobody asks the map how many documents there are; fully_shard takes it there.
        flash.expect_samples(len(every[mine]))
        if not isinstance(model, FSDPModule):
            numbers = numbers.to(device())
        output = flash(ids.to(device()), places.to(device()), numbers)
        packed.losses(output).sum().backward()
        errors.append(error(flash.get_norm_sample(), truth.norms[mine]))
        errors += errors_of_sums(model, truth.clipped(C))
    settled = flash._sharded.together._settled_with == flash._trainable.count
    return {"error": max(errors), "settled": settled}


class Tables(nn.Module):
    """Texts with their lengths, of words of one kind: a table with a single row."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.kinds = nn.Embedding(VOCAB, 8), nn.Embedding(1, 8)
        self.head = nn.Linear(8, 3)
        self.checkpointed = checkpointed

    def embed(self, ids: Tensor, kinds: Tensor) -> Tensor:
        return self.words(ids) + self.kinds(kinds)

    def forward(self, ids: Tensor, kinds: Tensor, lengths: Tensor) -> Tensor:
        x = self.embed(ids, kinds)
        if self.checkpointed:
            x = checkpoint(self.embed, ids, kinds, use_reentrant=False)
        pack, pad = nn.utils.rnn.pack_padded_sequence, nn.utils.rnn.pad_packed_sequence
        packed = pack(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(pad(packed, batch_first=True)[0].mean(1))


class Bags(nn.Module):
    """Words of all samples one after the other, and where those of each begin."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.head = nn.EmbeddingBag(VOCAB, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(ids, offsets))


def tables_without_samples(rank: int, kind: str, **options: Any) -> float:
    """The second process has no samples, of a model that does not run on any numbers: a table has
    its rows, bags begin with the first, and no text has the length 0."""
    ids, y = batch()
    numbers = torch.arange(SAMPLES, device=device())

    def called(model: Any, samples: Tensor) -> Tensor:
        own = ids[samples]
        if kind == "bags":
            return model(own.flatten(), 5 * torch.arange(len(own), device=own.device))
        return model(own, torch.zeros_like(own), torch.full_like(samples, 5))

    def build() -> Any:
        return (Bags() if kind == "bags" else Tables(kind == "checkpointed")).double().to(device())

    whole = truth_by_autograd(
        build(), (numbers, y), lambda m, given: F.cross_entropy(called(m, given[0]), given[1])
    )
    model = sharded(build(), how="leaves")
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=C, **options)
    mine = numbers[: 0 if rank else SAMPLES]
    errors = []
    for _ in range(2):
        flash.zero_grad(set_to_none=True)
        flash.expect_samples(len(mine))
        rows = numbers[: max(1, len(mine))]
        F.cross_entropy(called(flash, rows), y[rows]).backward()
        errors.append(error(flash.get_norm_sample(), whole.norms[mine]))
        errors += errors_of_sums(model, whole.clipped(C))
    return max(errors)


#: Kinds, and options of the private model.
TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "bags": ("bags", {}),
    "one row": ("one row", {}),
    "two_pass": ("one row", {"mode": "two_pass"}),
    "checkpointed": ("checkpointed", {}),
    "checkpointed, two_pass": ("checkpointed", {"mode": "two_pass"}),
}


def checkpointed(rank: int, folder: str) -> dict[str, Any]:
    """Saved after two steps, and taken up by another model; the end of both."""
    from torch.distributed import checkpoint as dcp

    def start(seed: int) -> tuple[Any, Any, PrivateState]:
        model, step, state = resumable(lambda model: sharded(model), seed)
        return model, lambda: step(*local(rank, everyone())), state

    first, step, state = start(0)
    step()
    step()
    state.extra = {"epoch": 3}
    dcp.save({"run": state}, checkpoint_id=folder)
    step()
    second, step, state = start(1)
    dcp.load({"run": state}, checkpoint_id=folder)
    loaded = [*state.engine.accountant.history]
    step()
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return {
        "files": len([*Path(folder).glob("*.distcp")]),
        "equal": all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs),
        "loaded": loaded,
        "extra": state.extra,
        "history": state.engine.accountant.history,
        "end": {n: p.full_tensor().detach().clone() for n, p in second.named_parameters()},
        # The last: what it refuses has been read into the weights by then.
        "again": message(lambda: dcp.load({"run": state}, checkpoint_id=folder)),
        "folder": folder,
    }


def resumable(prepare: Any, seed: int) -> tuple[nn.Module, Any, PrivateState]:
    """A model with other weights for each seed, a step of it, and what is saved of it."""
    model = prepare(make())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + seed)
    engine = FlashPrivacyEngine(accountant="rdp")
    flash, optimizer, _, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(Rows(), batch_size=4),
        noise_multiplier=0.0,
        max_grad_norm=C,
    )

    def step(ids: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(flash(ids), y).backward()
        optimizer.step()

    return model, step, PrivateState(engine, flash, optimizer)


def offloaded_gradient() -> bool:
    """A parameter whose shards are on another device than its mesh is for gets its gradient there,
    as ``CPUOffloadPolicy`` has them on GPUs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from flash_clipping.distributed.parameter_slots import ParameterSlots

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    whole = torch.arange(10.0, device=device()).view(5, 2)
    param: Any = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    own = param.to_local().detach()
    model = nn.Module()
    model.weight = param
    slots = ParameterSlots(model, lambda *_: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "_device_type", "meta")
        param.grad = slots.as_sharded(param, 2 * own)
    return torch.equal(all_of(param.grad), 2 * whole)


def mixed_precision(rank: int, mode: str) -> float:
    """bf16 in forward, fp32 shards: beside the same arithmetic in one process, part by part."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    cuts = everyone()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = sharded(make(torch.float32), mp_policy=policy)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=C, mode=mode)  # type: ignore[arg-type]
    ids, y = local(rank, cuts)
    F.cross_entropy(flash(ids), y).backward()
    expected: dict[str, Tensor] = {}
    for part in range(len(cuts) - 1):
        plain = make(torch.bfloat16)
        alone = GradSampleModuleFlashClipping(plain, max_grad_norm=C, mode=mode)  # type: ignore[arg-type]
        ids, y = local(part, cuts)
        F.cross_entropy(alone(ids), y).backward()
        for name, p in plain.named_parameters():
            assert p.grad is not None and p.grad.dtype == torch.float32
            expected[name] = expected.get(name, 0) + p.grad
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    return max(error(p.grad.full_tensor(), expected[n]) for n, p in model.named_parameters())


def refusals(rank: int) -> Parts:
    """What is not served, and what is said of it."""
    from torch.distributed.fsdp import fully_shard

    ids, y = local(rank, everyone())

    def wrap(model: Any, **options: Any) -> Any:
        return GradSampleModuleFlashClipping(model, max_grad_norm=C, **options)

    def parts_only() -> None:
        model = make()
        fully_shard(model.blocks[0])
        wrap(model)

    def ignored() -> None:
        model = make()
        fully_shard(model, ignored_params={model.head.weight})
        wrap(model)

    def stepped(change: Any = None, backward: Any = None) -> None:
        model = sharded(make())
        flash = wrap(model)
        optimizer = optimizer_of(model, flash, 1.0)
        loss = F.cross_entropy(flash(ids), y)
        (backward or (lambda loss, model: loss.backward()))(loss, model)
        if change is not None:
            change(model)
        optimizer.step()

    def followed_too_early() -> None:
        flash = wrap(model := make())
        optimizer_of(sharded(model), flash, 1.0)

    def past_a_tap() -> None:
        model = make()
        block: Any = model.blocks[0]
        block.down.forward = lambda x: F.linear(x, block.gate.weight.mT)
        F.cross_entropy(wrap(sharded(model))(ids), y).backward()

    def split() -> None:
        # By a loader whose other processes' batches nobody knows.
        model = sharded(make())
        optimizer = optimizer_of(model, wrap(model), 1.0)
        manager = BatchMemoryManager(
            data_loader=DataLoader(Rows(), batch_size=4),
            max_physical_batch_size=2,
            optimizer=optimizer,
        )
        next(iter(manager.__enter__()))

    return {
        "parts only": parts_only,
        "ignored": ignored,
        "followed too early": followed_too_early,
        "changed": lambda: stepped(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-9)),
        "some": lambda: stepped(backward=lambda x, m: x.backward(inputs=[m.head.weight])),
        "split": split,
        "compile": lambda: wrap(torch.compile(sharded(make()), backend="eager")),
        "other units": lambda: engine_run({}, unit=Users([n % (2 + rank) for n in range(24)])),
        "units in parts": lambda: engine_run({}, part=1, unit=Users(UNITS)),
        "past a tap": past_a_tap,
    }
