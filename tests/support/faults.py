"""A small training in which anything may fail."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flash_clipping import FlashClippingError, FlashDPOptimizer, GradSampleModuleFlashClipping
from tests.support.models import Block, Scale


class NetOfEveryRule(nn.Module):
    """A rule of every kind, stand-ins for bare parameters, vmap, and checkpointing on demand."""

    def __init__(self, checkpointing: str = "none"):
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(3, 8, 2)
        self.group = nn.GroupNorm(2, 8)
        self.block = Block(8)
        self.scale = Scale(8)
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor, signal: Tensor) -> Tensor:
        y = F.relu(self.group(self.conv(signal)), inplace=True).mT
        x = torch.cat([self.embed(ids), y], dim=1)
        if self.checkpointing == "none":
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(self.scale(x))


def batch(size: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 11, (size, 4), generator=generator)
    target = torch.randint(0, 5, (size,), generator=generator)
    return ids, torch.randn(size, 3, 5, generator=generator), target


class Trainer:
    """Model and optimizer in their initial state; ``step`` is a user's step."""

    def __init__(self, mode: str = "one_pass", checkpointing: str = "none", generic: bool = False):
        torch.manual_seed(0)
        self.plain = NetOfEveryRule(checkpointing)
        self.initial = [param.detach().clone() for param in self.plain.parameters()]
        self.module = GradSampleModuleFlashClipping(
            self.plain, max_grad_norm=0.1, mode=mode, force_functorch=generic
        )
        self.inner = torch.optim.SGD(self.plain.parameters(), lr=0.1)
        self.optimizer = FlashDPOptimizer(
            self.inner, noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=3
        )

    def step(self, data: tuple[Tensor, ...]) -> None:
        self.module.expect_samples(None if len(data[0]) else 0)
        if not len(data[0]):  # a row of nobody stands for none
            data = tuple(x.new_zeros(1, *x.shape[1:]) for x in data)
        ids, signal, target = data
        self.optimizer.zero_grad()
        output = self.module(ids, signal)
        F.cross_entropy(output.mean(1), target).backward()
        if self.optimizer.pre_step():
            self.update()

    def update(self) -> None:
        """PyTorch's own part of a step: a fault there is PyTorch's."""
        self.inner.step()

    def start_again(self) -> None:
        """The parameters as at first; who is a sample stays shown, which takes most of a first
        step's time."""
        with torch.no_grad():
            for param, initial in zip(self.plain.parameters(), self.initial, strict=True):
                param.copy_(initial)

    def state(self) -> dict[str, Tensor]:
        found = {name: param.detach().clone() for name, param in self.plain.named_parameters()}
        found |= {f"{name}.grad": param.grad for name, param in self.plain.named_parameters()}
        found["norms"] = self.module.get_norm_sample()
        return found


class Fault(TorchDispatchMode):
    """Raises at the n-th operator; notes every tensor that operators made before."""

    def __init__(self, at: int, exception: BaseException | None):
        super().__init__()
        self.at = at
        self.exception = exception
        self.count = 0
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.count == self.at and self.exception is not None:
            self.count += 1
            exception, self.exception = self.exception, None
            try:
                raise exception
            finally:
                del exception  # or its traceback's frames would keep each other alive
        self.count += 1
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.made.append(weakref.ref(result))
        return result

    def alive(self) -> list[Tensor]:
        return [tensor for ref in self.made if (tensor := ref()) is not None]


EXCEPTIONS: list[Callable[[], BaseException]] = [
    lambda: RuntimeError("injected"),
    lambda: torch.OutOfMemoryError("injected"),
    KeyboardInterrupt,
    lambda: ValueError("injected"),
]


def operators_in_a_step(**options: Any) -> tuple[int, int]:
    """Of the first step, which is rehearsed, and of any other."""
    trainer = Trainer(**options)
    trainer.update = lambda: None  # type: ignore[method-assign]
    counts = []
    for _ in range(2):
        counter = Fault(-1, None)
        with counter:
            trainer.step(batch())
        counts.append(counter.count)
    return counts[0], counts[1]


def spread(first: int, other: int, rehearsed: int, own: int, offset: int = 0) -> list[int]:
    """Places in a first step, as :func:`operators_in_a_step` counts: so many in its rehearsal,
    which is most of it, and so many in what every step does."""
    places: list[int] = []
    for begin, end, count in ((0, first - other, rehearsed), (first - other, first, own)):
        stride = max(1, (end - begin) // count)
        places += range(begin + offset % stride, end, stride)
    return places


def state_after_one_step(**options: Any) -> dict[str, Tensor]:
    trainer = Trainer(**options)
    trainer.step(batch())
    return trainer.state()


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{where}: {name} differs"


def assert_nothing_is_left(trainer: Trainer, fault: Fault, where: str) -> bool:
    """No tensor that the failed step made, and no pass; whether that took a garbage collection."""
    trainer.module.running_step.norms = None  # for users, until the next backward or step
    # After any failed backward, private or not, autograd's own queue holds what it did not get to
    # until the next backward, of whatever.
    torch.ones(1, requires_grad=True).sum().backward()
    own = {id(param) for param in trainer.plain.parameters()}

    def left() -> list[torch.Size]:
        return [tensor.shape for tensor in fault.alive() if id(tensor) not in own]

    in_a_cycle = bool(left())
    if in_a_cycle:
        gc.collect()
    assert not left(), f"{where}: tensors of the failed step are alive: {left()}"
    assert trainer.module._session.calls.running_pass() is None, where
    return in_a_cycle


VARIANTS: dict[str, dict[str, Any]] = {
    "one_pass": {},
    "two_pass": {"mode": "two_pass"},
    "generic": {"generic": True},
    "non-reentrant": {"checkpointing": "non-reentrant"},
    "reentrant": {"checkpointing": "reentrant"},
    "reentrant-two_pass": {"checkpointing": "reentrant", "mode": "two_pass"},
}


def fail_at_operators(
    options: dict[str, Any],
    positions: Iterable[int],
    remember: bool = False,
    rehearsal: int | None = None,
) -> int:
    """Fail at these operators of a first step; return how many failures reached the user.

    Where it is told how many operators a ``rehearsal`` has, two of three of those behind it fail in
    a later step, of a trainer that was there before: a new one rehearses for most of its time.
    """
    shown: Trainer | None = None
    remembered: list[BaseException] = []
    collected = 0
    expected = state_after_one_step(**options)
    failed = 0
    for n, at in enumerate(positions):
        skipped = 0
        if rehearsal is not None and at >= rehearsal and n % 3 and shown is not None:
            trainer, skipped = shown, rehearsal
            trainer.start_again()
        else:
            trainer = Trainer(**options)
        fault = Fault(at - skipped, EXCEPTIONS[at % len(EXCEPTIONS)]())
        where = f"operator {at}"
        raised = False
        with fault:
            try:
                trainer.step(batch())
            except (Exception, KeyboardInterrupt) as error:
                first_of_all: BaseException = error
                if isinstance(error, FlashClippingError):  # the model itself has not raised
                    assert "a fault of flash clipping" in str(error), where
                    while first_of_all.__cause__ is not None:
                        first_of_all = first_of_all.__cause__
                assert first_of_all.args in (("injected",), ()), where
                del first_of_all
                raised = True
                if remember:
                    remembered.append(error)
        if not raised:
            # vmap takes an error for one of its own, and the function goes sample by sample.
            shown = None
            for name, value in trainer.state().items():
                torch.testing.assert_close(value, expected[name])
            continue
        failed += 1
        trainer.optimizer.zero_grad()
        if not remember:
            collected += assert_nothing_is_left(trainer, fault, where)
        trainer.step(batch())
        assert_same_state(trainer.state(), expected, where)
        shown = trainer
    assert collected <= failed / 20  # an out-of-memory error must free memory at once
    return failed
