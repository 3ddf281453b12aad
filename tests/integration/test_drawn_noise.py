"""No noise is drawn twice from one state of a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_clipping import FlashClippingError
from flash_clipping.integration.drawn_noise import DrawnStates
from tests.support.private import Private, data


def seeded(private: Private) -> Callable[[], Any]:
    return lambda: torch.manual_seed(7)


def state(private: Private) -> Callable[[], Any]:
    saved = torch.get_rng_state()
    return lambda: torch.set_rng_state(saved)


def own_seed(private: Private) -> Callable[[], Any]:
    return lambda: private.optimizer.generator.manual_seed(7)


def own_state(private: Private) -> Callable[[], Any]:
    saved = private.optimizer.generator.get_state()
    return lambda: private.optimizer.generator.set_state(saved)


@pytest.mark.parametrize("between", [0, 3])
@pytest.mark.parametrize("repeat", [seeded, state, own_seed, own_state])
def test_the_same_state_twice(repeat: Callable[[Private], Callable[[], Any]], between: int) -> None:
    """Two releases differed by data alone: their difference has no noise."""
    own = repeat in (own_seed, own_state)
    generator = torch.Generator().manual_seed(3) if own else None
    private = Private(noise_generator=generator, lr=0.0)
    again = repeat(private)
    again()
    private.step(samples=1)
    for _ in range(between):
        private.step(samples=3)
    again()
    private.optimizer.zero_grad()
    private.backward(samples=2)
    with pytest.raises(FlashClippingError, match="can be subtracted. Was torch.manual_seed"):
        private.optimizer.step()
    torch.manual_seed(8)
    if generator is not None:
        generator.manual_seed(8)
    private.step()


def test_no_noise_repeats_nothing() -> None:
    private = Private(noise_multiplier=0.0)
    for _ in range(3):
        torch.manual_seed(1)
        private.step()


def test_a_later_optimizer_of_the_model_remembers() -> None:
    private = Private()
    torch.manual_seed(5)
    private.step()
    module, optimizer, criterion, _ = private.engine.make_private(
        module=private.wrapper,
        optimizer=private.optimizer,
        data_loader=private.loader,
        noise_multiplier=1.0,
        max_grad_norm=0.1,
        poisson_sampling=False,
    )
    optimizer.zero_grad()
    x, y = (part[:2] for part in data().tensors)
    criterion(module(x), y).backward()
    torch.manual_seed(5)
    with pytest.raises(FlashClippingError, match="can be subtracted"):
        optimizer.step()


class OnGpu:
    """What is asked of a CUDA generator."""

    def __init__(self, seed: int, index: int = 0):
        self.device, self.seed, self.offset = torch.device("cuda", index), seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def draw(self, drawn: DrawnStates, count: int = 4) -> None:
        generators: Any = [self]
        drawn.check(generators)
        drawn.note(generators)
        self.offset += count
        drawn.note_end(generators)


def test_the_way_back_of_a_gpu_generator_is_refused() -> None:
    """Its noise is known by seed and offset: a part of it drawn again is refused as well."""
    drawn, generator = DrawnStates(), OnGpu(1)
    generator.draw(drawn)
    generator.offset += 8  # dropout
    generator.draw(drawn)
    for offset in (0, 4, 15):
        generator.offset = offset
        with pytest.raises(FlashClippingError, match="cuda:0 at seed 1 before"):
            generator.draw(drawn)
    generator.offset = 16
    generator.draw(drawn)
    generator.seed, generator.offset = 2, 0
    generator.draw(drawn)


def test_gpus_with_one_seed_are_counted_apart() -> None:
    """The kernels' noise differs between them (``tests/ops/test_noise.py``)."""
    drawn = DrawnStates()
    OnGpu(1).draw(drawn)
    OnGpu(1, 1).draw(drawn)
    with pytest.raises(FlashClippingError, match="cuda:1 at seed 1"):
        OnGpu(1, 1).draw(drawn)


@pytest.mark.gpu
def test_the_same_state_twice_on_a_gpu() -> None:
    param = torch.nn.Parameter(torch.zeros(1000, device="cuda"))
    from flash_clipping import FlashDPOptimizer

    optimizer = FlashDPOptimizer(
        torch.optim.SGD([param], lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
    )

    def step() -> None:
        optimizer.zero_grad()
        param.grad = torch.zeros_like(param)
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    torch.manual_seed(3)
    step()
    step()
    torch.manual_seed(3)
    torch.rand(5, device="cuda")
    with pytest.raises(FlashClippingError, match="can be subtracted"):
        step()
    torch.manual_seed(4)
    step()
