"""The noise of a step: its words are used once, nobody can guess them, and a seed is a choice."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import AdaptiveBound, FlashDPOptimizer, FlashPrivacyEngine, PoissonSampling
from flash_clipping.engine.optimizer import DistributedFlashDPOptimizer
from flash_clipping.noise.correlated import CorrelatedNoise
from flash_clipping.noise.mechanisms import BandedInverseNoise, BandedNoise, BufferedNoise
from flash_clipping.ops.error_bounds import ETA
from flash_clipping.ops.noise import grid_of, noisy_means
from flash_clipping.randomness import Draw, Purpose, SecretStream
from flash_clipping.randomness.chacha import Keystream
from tests.support.errors import raises
from tests.support.private import Private

seeded = pytest.mark.filterwarnings("ignore::flash_clipping.randomness.SeededNoiseWarning")


def optimizer_of(params: list[nn.Parameter], **options: Any) -> FlashDPOptimizer:
    return FlashDPOptimizer(
        torch.optim.SGD(params, lr=0.0),
        **{"noise_multiplier": 1.0, "max_grad_norm": 2.0, "expected_batch_size": 4} | options,
    )


def released(optimizer: FlashDPOptimizer, size: int = 40) -> Tensor:
    """Noise of one step."""
    (param,) = optimizer.params
    optimizer.zero_grad()
    param.grad = torch.zeros(size, device=param.device)
    optimizer.step()
    return param.grad.clone()


def parameter(size: int = 40) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size))]


@pytest.mark.parametrize("secure_mode", [False, True])
def test_torchs_seed_says_nothing_of_noise(secure_mode: bool) -> None:
    """Neither in one run, where the same noise twice can be subtracted, nor in two; and drawing
    noise leaves the generator as it was."""
    found = []
    for _ in range(2):
        optimizer = optimizer_of(parameter(), secure_mode=secure_mode)
        for _ in range(2):
            torch.manual_seed(7)
            state = torch.get_rng_state()
            found.append(released(optimizer))
            assert torch.equal(torch.get_rng_state(), state)
    values = torch.cat(found)
    assert len(values.unique()) == len(values)


def test_every_step_has_a_draw_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import flash_clipping.engine.optimizer as module

    draws: list[Draw] = []

    def noted(*args: Any, draw: Draw, **kwargs: Any) -> Any:
        draws.append(draw)
        return noisy_means(*args, draw=draw, **kwargs)

    monkeypatch.setattr(module, "noisy_means", noted)
    private = Private(clipping=AdaptiveBound(0.5, 1e-3, 10.0, 0.1), batch_size=64)
    for _ in range(3):
        private.step(samples=64)
    assert [draw.purpose for draw in draws] == [Purpose.NOISE, Purpose.COUNT] * 3
    assert len({draw.number for draw in draws}) == 6 and len({draw.key for draw in draws}) == 1


class Summed:
    """What decides by how many rounds noise is made, of a sum that is nowhere."""

    def __init__(self, is_cuda: bool, dtype: torch.dtype = torch.float32):
        self.is_cuda, self.dtype = is_cuda, dtype


ON_GPU = [Summed(True), Summed(True, torch.bfloat16)]


@pytest.mark.parametrize(
    ("sums", "options", "rounds"),
    [
        (ON_GPU, {}, 12),
        (ON_GPU, {"secure_mode": True}, 20),
        (ON_GPU, {"noise_grid": True}, 12),
        (ON_GPU, {"noise_grid": "exact"}, 20),  # drawn on the CPU
        ([*ON_GPU, Summed(True, torch.float64)], {}, 20),
        ([*ON_GPU, Summed(False)], {}, 20),
        ([], {"secure_mode": True}, 20),
    ],
)
def test_how_many_rounds_noise_has(sums: Any, options: dict[str, Any], rounds: int) -> None:
    assert optimizer_of(parameter(), **options)._rounds(sums) == rounds


@pytest.mark.parametrize("noise", [None, BandedNoise(2), BandedInverseNoise(2)])
@pytest.mark.parametrize("rounds", [12, 20])
def test_rounds_reach_the_noise(rounds: int, noise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of independent and of correlated noise, and of what a step takes back of the one before."""
    monkeypatch.setattr(FlashDPOptimizer, "_rounds", lambda self, sums: rounds)
    found: list[int] = []
    fill = Keystream.fill

    def noted(self: Keystream, *args: Any) -> None:
        found.append(self._rounds)
        fill(self, *args)

    monkeypatch.setattr(Keystream, "fill", noted)
    optimizer = optimizer_of(parameter())
    if noise is not None:
        optimizer.correlated = CorrelatedNoise(noise, lambda batch: None)
    released(optimizer), released(optimizer)
    assert len(found) == (3 if isinstance(noise, BandedInverseNoise) else 2)
    assert {*found} == {rounds}


@pytest.mark.gpu
@pytest.mark.parametrize("secure_mode", [False, True])
def test_secure_mode_has_more_rounds_on_a_gpu(secure_mode: bool) -> None:
    """Bitwise that of the draw of as many rounds."""
    param = nn.Parameter(torch.zeros(40, device="cuda"))
    optimizer = optimizer_of([param], secure_mode=secure_mode)
    found = released(optimizer)
    of = Draw(optimizer.stream._key, Purpose.NOISE, 0, 20 if secure_mode else 12)
    (expected,) = noisy_means([torch.zeros_like(param)], 2.0 * (1 + ETA), 4.0, draw=of)
    assert torch.equal(found, expected)


@seeded
def test_equal_seeds_are_equal_noise() -> None:
    def noise(seed: int) -> Tensor:
        optimizer = optimizer_of(parameter(), stream=SecretStream(seed=seed))
        torch.rand(3)  # nobody's business
        return torch.cat([released(optimizer), released(optimizer)])

    first = noise(3)
    assert torch.equal(first, noise(3))
    assert not torch.equal(first, noise(4))
    assert not torch.equal(first[:40], first[40:])
    with raises("FC311", ValueError):
        optimizer_of(parameter(), generator=torch.Generator())


@seeded
def test_a_seed_in_secure_mode_is_refused() -> None:
    with raises("FC311", ValueError, match="seed=5"):
        FlashPrivacyEngine(secure_mode=True, seed=5)
    with raises("FC311", ValueError):
        optimizer_of(parameter(), secure_mode=True, stream=SecretStream(seed=1))


def test_secure_mode_needs_no_other_package_and_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*[Ss]ecure")
        for secure_mode in (False, True):
            engine = FlashPrivacyEngine(secure_mode=secure_mode)
            private = Private(engine=engine, poisson_sampling=True)
            private.step()
            assert private.optimizer.stream is private.engine.stream
            assert not private.engine.stream.is_seeded


@seeded
@pytest.mark.parametrize("seed", [None, 3])
def test_a_later_optimizer_of_the_model_draws_nothing_again(seed: int | None) -> None:
    """Also of another engine with the same seed: its noise goes on behind."""
    drawn: list[Draw] = []
    private = Private(engine=FlashPrivacyEngine(accountant="rdp", seed=seed))
    for engine in (private.engine, FlashPrivacyEngine(accountant="rdp", seed=seed)):
        private.step()
        drawn.append(private.optimizer.stream.draw(Purpose.NOISE))
        private.engine = engine
        private.wrapper, private.optimizer, _ = engine.make_private(
            module=private.wrapper,
            optimizer=private.optimizer,
            data_loader=private.loader,
            noise_multiplier=1.0,
            max_grad_norm=0.1,
            poisson_sampling=False,
        )
    drawn.append(private.optimizer.stream.draw(Purpose.NOISE))
    assert len({*drawn}) == 3
    for one, two in zip(drawn, drawn[1:], strict=False):
        assert one.key != two.key or one.number < two.number


@seeded
@pytest.mark.parametrize("seed", [None, 3])
def test_a_resumed_run_draws_nothing_again(tmp_path: Path, seed: int | None) -> None:
    def start() -> Private:
        return Private(engine=FlashPrivacyEngine(accountant="rdp", seed=seed))

    first, found = start(), []
    stream = first.optimizer.stream
    first.step()
    found.append(stream.draw(Purpose.NOISE))
    kept = {"mine": 1}
    path = tmp_path / "checkpoint.pt"
    first.engine.save_checkpoint(
        path=path, module=first.wrapper, optimizer=first.optimizer, checkpoint_dict=kept
    )
    assert kept == {"mine": 1}
    text = path.read_bytes()
    assert found[0].key not in text and found[0].key.hex().encode() not in text
    again = []
    for _ in range(2):
        other = start()
        loaded = other.engine.load_checkpoint(
            path=path, module=other.wrapper, optimizer=other.optimizer
        )
        assert loaded["mine"] == 1 and loaded["noise_stream_state_dict"]["seed"] == seed
        other.step()
        again.append(other.optimizer.stream.draw(Purpose.NOISE))
    assert (again[0] == again[1]) == (seed is not None)  # with a seed runs repeat each other
    for draw in again:
        assert draw.key != found[0].key or draw.number > found[0].number
    # To go back within a run does not bring the words back.
    before = stream.draw(Purpose.NOISE).number
    first.engine.load_checkpoint(path=path, module=first.wrapper, optimizer=first.optimizer)
    assert stream.draw(Purpose.NOISE).number == before + 1


def test_noisy_sums_on_a_grid() -> None:
    """What is released is a multiple of a number that depends on the noise's deviation alone."""
    private = Private(mechanism=PoissonSampling(noise_grid=True), max_grad_norm=0.3, lr=0.0)
    grid = grid_of(0.3, torch.float32)
    for samples in (1, 7):
        private.step(samples)
        for p in private.plain.parameters():
            cells = p.grad * 16 / grid
            assert torch.equal(cells, cells.round()) and p.grad.unique().numel() > 1
    private = Private(lr=0.0)
    private.step()
    cells = torch.cat([p.grad.flatten() for p in private.plain.parameters()]) * 16 / grid
    assert not torch.equal(cells, cells.round())
    given = dict.fromkeys(("noise_multiplier", "max_grad_norm", "expected_batch_size"), 1.0)
    with raises("FC317", NotImplementedError):
        DistributedFlashDPOptimizer(private.optimizer.original_optimizer, noise_grid=True, **given)


@pytest.mark.gpu
@pytest.mark.parametrize("noise", ["independent", "exact", "inverse", "buffers"])
def test_a_step_on_a_gpu_waits_for_nothing(noise: str) -> None:
    param = nn.Parameter(torch.zeros(1000, device="cuda"))
    optimizer = optimizer_of([param], noise_grid="exact" if noise == "exact" else False)
    correlated = {"inverse": BandedInverseNoise(3), "buffers": BufferedNoise((0.4,), (0.9,))}
    if noise in correlated:
        optimizer.correlated = CorrelatedNoise(correlated[noise], lambda batch: None)

    def step() -> Tensor:
        optimizer.zero_grad()
        param.grad = torch.zeros_like(param)
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return param.grad.clone()

    torch.manual_seed(3)
    first = step()
    torch.manual_seed(3)
    assert not torch.equal(first, step())
