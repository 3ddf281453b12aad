"""``FlashPrivacyEngine`` from end to end, against Opacus' own engine."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
)
from opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.schedulers import ExponentialGradClip, ExponentialNoise, StepGradClip
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import (
    FlashClippingError,
    FlashLoss,
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
    register_flash_norm_samplers,
)

MODES = ["one_pass", "two_pass"]


def digits() -> TensorDataset:
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = datasets.load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    return TensorDataset(x, torch.tensor(labels))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


class Training:
    """A model, its optimizer and its data, private by whichever engine and mode."""

    def __init__(
        self,
        engine: PrivacyEngine,
        make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        *,
        model: nn.Module | None = None,
        dataset: TensorDataset | None = None,
        batch_size: int = 128,
        lr: float = 0.1,
        **options: Any,
    ):
        self.engine = engine
        self.plain = model if model is not None else network()
        options = {"max_grad_norm": 0.5, "noise_multiplier": 0.0} | options
        make = engine.make_private
        if "target_epsilon" in options:
            del options["noise_multiplier"]
            make = engine.make_private_with_epsilon
        self.criterion: Any = nn.CrossEntropyLoss(reduction=options.get("loss_reduction", "mean"))
        private = make(
            module=self.plain,
            optimizer=make_optimizer(self.plain.parameters(), lr=lr),
            data_loader=DataLoader(dataset or digits(), batch_size=batch_size),
            criterion=self.criterion,
            **options,
        )
        self.wrapper, self.optimizer, self.loader = private[0], private[1], private[-1]
        if len(private) == 4:
            self.criterion = private[2]
        wraps = options.get("wrap_model", True)
        self.model = self.wrapper if wraps else self.plain

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.model(x), y).backward()
        self.optimizer.step()

    def steps(self, count: int, seed: int = 1) -> Training:
        torch.manual_seed(seed)
        done = 0
        while done < count:
            for x, y in self.loader:
                self.step(x, y)
                done += 1
                if done == count:
                    break
        return self

    def state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.plain.state_dict().items()}


def assert_states_close(found: Training, expected: Training, tolerance: float = 1e-5) -> None:
    for name, value in expected.state().items():
        torch.testing.assert_close(
            found.state()[name], value, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


# -- the same training as Opacus ------------------------------------------------------------------


@pytest.mark.parametrize("poisson_sampling", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_twenty_steps_of_adamw_equal_opacus_hooks(mode: str, poisson_sampling: bool) -> None:
    options = {"poisson_sampling": poisson_sampling, "lr": 1e-3}
    start = network().state_dict()
    hooks = Training(PrivacyEngine(), torch.optim.AdamW, **options).steps(20)
    flash = Training(FlashPrivacyEngine(), torch.optim.AdamW, mode=mode, **options).steps(20)
    assert_states_close(flash, hooks)
    moved = max((flash.state()[name] - start[name]).abs().max().item() for name in start)
    assert moved > 1e-2  # there was something to compare


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("wrap_model", [True, False])
def test_sgd_equals_opacus_hooks(wrap_model: bool, loss_reduction: str) -> None:
    lr = 0.5 if loss_reduction == "mean" else 0.5 / 128
    options = {"wrap_model": wrap_model, "loss_reduction": loss_reduction, "lr": lr}
    hooks = Training(PrivacyEngine(), **options).steps(5)
    flash = Training(FlashPrivacyEngine(), **options).steps(5)
    assert_states_close(flash, hooks)


def test_same_epsilon_as_opacus() -> None:
    options: dict[str, Any] = {"noise_multiplier": 1.1, "poisson_sampling": True}
    for accountant in ("prv", "rdp", "gdp"):
        hooks = Training(PrivacyEngine(accountant=accountant), **options).steps(20)
        flash = Training(FlashPrivacyEngine(accountant=accountant), **options).steps(20)
        assert flash.engine.accountant.history == hooks.engine.accountant.history
        assert flash.engine.get_epsilon(1e-5) == hooks.engine.get_epsilon(1e-5)
        assert flash.engine.get_epsilon(1e-5) > 0


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_noise_is_gaussian_of_the_right_variance(loss_reduction: str) -> None:
    """noise = sigma C on the sum; a two-sided test of its variance and one of its distribution."""
    stats = pytest.importorskip("scipy.stats")
    training = Training(
        FlashPrivacyEngine(),
        model=nn.Sequential(nn.Flatten(), nn.Linear(64, 300), nn.Linear(300, 10)),
        noise_multiplier=1.3,
        max_grad_norm=0.7,
        loss_reduction=loss_reduction,
        poisson_sampling=False,
        batch_size=32,
    )
    torch.manual_seed(2)
    noises = []
    for x, y in list(training.loader)[:2]:
        training.optimizer.zero_grad()
        training.criterion(training.model(x), y).backward()
        clipped = [param.grad.clone() for param in training.plain.parameters()]
        training.optimizer.step()
        divisor = training.optimizer.expected_batch_size if loss_reduction == "mean" else 1
        noises.append(
            torch.cat(
                [
                    (param.grad * divisor - before).flatten()
                    for param, before in zip(training.plain.parameters(), clipped, strict=True)
                ]
            ).double()
            / (1.3 * 0.7)
        )
    for noise in noises:
        chi2 = noise.square().sum().item()
        tail = stats.chi2.cdf(chi2, len(noise))
        assert 1e-4 < tail < 1 - 1e-4, f"variance {chi2 / len(noise):.4f} of {len(noise)} draws"
        assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-4
    correlation = stats.pearsonr(noises[0].numpy(), noises[1].numpy())
    assert correlation.pvalue > 1e-4  # fresh noise at every step


def test_make_private_with_epsilon() -> None:
    options = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 2, "batch_size": 200}
    hooks = Training(PrivacyEngine(), **options)
    flash = Training(FlashPrivacyEngine(), mode="two_pass", **options)
    assert flash.optimizer.noise_multiplier == hooks.optimizer.noise_multiplier
    flash.steps(2 * len(flash.loader))
    assert 2.9 < flash.engine.get_epsilon(1e-5) <= 3.01
    assert isinstance(flash.wrapper, GradSampleModuleFlashClipping)
    assert flash.wrapper.mode == "two_pass"


@pytest.mark.parametrize("mode", MODES)
def test_poisson_sampling_with_empty_batches(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    few = TensorDataset(
        torch.randn(40, 1, 8, 8, generator=generator),
        torch.randint(0, 10, (40,), generator=generator),
    )
    training = Training(FlashPrivacyEngine(), dataset=few, batch_size=1, mode=mode, lr=1.0)
    torch.manual_seed(3)
    sizes = []
    for x, y in training.loader:
        before = training.state()
        training.step(x, y)
        sizes.append(len(x))
        assert training.wrapper.get_norm_sample().shape == (len(x),)
        unchanged = all(
            torch.equal(before[name], value) for name, value in training.state().items()
        )
        assert unchanged == (len(x) == 0)
    assert 0 in sizes and max(sizes) > 1
    # Every batch counts for the budget, empty ones too.
    assert sum(steps for *_, steps in training.engine.accountant.history) == len(sizes) == 40


def test_empty_batch_gets_noise() -> None:
    training = Training(FlashPrivacyEngine(), noise_multiplier=1.0)
    before = training.state()
    training.step(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long))
    for name, value in training.state().items():
        assert torch.isfinite(value).all()
        assert not torch.equal(value, before[name])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poisson_sampling", [True, False])
def test_virtual_steps_equal_one_big_batch(mode: str, poisson_sampling: bool) -> None:
    options: dict[str, Any] = {"mode": mode, "poisson_sampling": poisson_sampling, "lr": 0.5}
    whole = Training(FlashPrivacyEngine(), **options).steps(5)
    parts = Training(FlashPrivacyEngine(), **options)
    torch.manual_seed(1)
    physical = logical = 0
    with BatchMemoryManager(
        data_loader=parts.loader, max_physical_batch_size=24, optimizer=parts.optimizer
    ) as loader:
        for x, y in loader:
            assert len(x) <= 24
            parts.step(x, y)
            physical += 1
            logical = sum(steps for *_, steps in parts.engine.accountant.history)
            if logical == 5:
                break
    assert physical > 20
    assert_states_close(parts, whole, 1e-6)
    assert parts.engine.accountant.history == whole.engine.accountant.history


def test_schedulers_change_noise_and_clipping() -> None:
    training = Training(FlashPrivacyEngine(), noise_multiplier=1.0, poisson_sampling=False)
    noise = ExponentialNoise(training.optimizer, gamma=0.5)
    clip = ExponentialGradClip(training.optimizer, gamma=0.1)
    expectations = ((1.0, 0.5), (0.5, 0.05), (0.25, 0.005))
    for epoch, (expected_noise, expected_clip) in enumerate(expectations):
        training.steps(1, seed=epoch)  # the same noise twice is refused
        norms, coef = training.wrapper.get_norm_sample(), training.wrapper.get_clipping_coef()
        torch.testing.assert_close(coef, (expected_clip / (norms + 1e-6)).clamp(max=1))
        total = torch.cat([p.summed_grad.flatten() for p in training.plain.parameters()]).norm()
        assert total <= expected_clip * len(norms) * (1 + 1e-5)
        assert training.optimizer.noise_multiplier == pytest.approx(expected_noise)
        assert training.optimizer._noise_std() == pytest.approx(expected_noise * expected_clip)
        noise.step()
        clip.step()
    multipliers = [multiplier for multiplier, *_ in training.engine.accountant.history]
    assert multipliers == pytest.approx([1.0, 0.5, 0.25])


def test_checkpoint_resumes_where_it_was() -> None:
    options: dict[str, Any] = {"poisson_sampling": False, "noise_multiplier": 0.0, "lr": 1e-3}
    through = Training(FlashPrivacyEngine(), torch.optim.AdamW, **options)
    batches = list(through.loader)[:6]
    for x, y in batches:
        through.step(x, y)

    first = Training(FlashPrivacyEngine(), torch.optim.AdamW, **options)
    scheduler = StepGradClip(first.optimizer, step_size=100, gamma=0.5)
    for x, y in batches[:3]:
        first.step(x, y)
        scheduler.step()
    file = io.BytesIO()
    first.engine.save_checkpoint(
        path=file,
        module=first.wrapper,
        optimizer=first.optimizer,
        grad_clip_scheduler=scheduler,
        checkpoint_dict={"epoch": 1},
    )
    file.seek(0)

    second = Training(
        FlashPrivacyEngine(), torch.optim.AdamW, model=copy.deepcopy(network()), **options
    )
    second_scheduler = StepGradClip(second.optimizer, step_size=100, gamma=0.5)
    checkpoint = second.engine.load_checkpoint(
        path=file,
        module=second.wrapper,
        optimizer=second.optimizer,
        grad_clip_scheduler=second_scheduler,
    )
    assert checkpoint["epoch"] == 1
    assert second_scheduler.last_epoch == scheduler.last_epoch
    for x, y in batches[3:]:
        second.step(x, y)
    assert_states_close(second, through, 0.0)
    assert second.engine.accountant.history == through.engine.accountant.history


def test_checkpoint_of_opacus_loads() -> None:
    """State dicts have Opacus' names: a model trained by its engine goes on with this one."""
    hooks = Training(PrivacyEngine(), poisson_sampling=False).steps(2)
    file = io.BytesIO()
    hooks.engine.save_checkpoint(path=file, module=hooks.wrapper, optimizer=hooks.optimizer)
    file.seek(0)
    flash = Training(FlashPrivacyEngine(), poisson_sampling=False)
    flash.engine.load_checkpoint(path=file, module=flash.wrapper, optimizer=flash.optimizer)
    assert_states_close(flash, hooks, 0.0)
    assert_states_close(flash.steps(2), hooks.steps(2))
    assert flash.engine.accountant.history == hooks.engine.accountant.history


# -- without wrapping -----------------------------------------------------------------------------


def tiny_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=31,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config).double()


def own_loss_norms(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms of all samples' gradients by plain autograd, one sample at a time; the gradients."""
    grads: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for row in ids:
        model.zero_grad()
        model(input_ids=row[None], labels=row[None]).loss.backward()
        for name, param in model.named_parameters():
            grads[name].append(param.grad.clone())
    model.zero_grad()
    stacked = {name: torch.stack(parts) for name, parts in grads.items()}
    squares = [value.flatten(1).square().sum(1) for value in stacked.values()]
    return torch.stack(squares).sum(0).sqrt(), stacked


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap_model", [True, False])
def test_gpt2_with_its_own_loss(wrap_model: bool, mode: str) -> None:
    """``position_ids`` of shape [1, T], a head tied to the embedding, a loss inside the model."""
    model = tiny_gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    ids = torch.randint(0, 31, (5, 9))
    norms, grads = own_loss_norms(model, ids)
    bound = norms.median().item()
    engine = FlashPrivacyEngine()
    wrapper, optimizer, _, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(ids), batch_size=5),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        poisson_sampling=False,
        wrap_model=wrap_model,
        mode=mode,
    )
    callable_model = wrapper if wrap_model else model
    for _ in range(2):
        optimizer.zero_grad()
        outputs = callable_model(input_ids=ids, labels=ids)
        outputs.loss.backward()
        # The model is in float64, but transformers computes the loss in float32.
        torch.testing.assert_close(wrapper.get_norm_sample(), norms, rtol=1e-6, atol=0)
        coef = (bound / (norms + 1e-6)).clamp(max=1)
        for name, param in model.named_parameters():
            clipped = torch.einsum("b,b...->...", coef, grads[name])
            torch.testing.assert_close(param.grad, clipped, rtol=1e-5, atol=1e-7)
    optimizer.step()
    assert all(
        (param.grad * 5 - param.summed_grad).abs().max() < 1e-12 for param in model.parameters()
    )


def test_unwrapped_model_is_left_as_it_was() -> None:
    training = Training(FlashPrivacyEngine(), wrap_model=False, poisson_sampling=False)
    names = set(network().state_dict())
    assert set(training.plain.state_dict()) == names
    assert type(training.plain) is nn.Sequential
    training.steps(1)
    training.wrapper.cleanup()
    reference = network()
    reference.load_state_dict(training.plain.state_dict())
    x, y = next(iter(training.loader))
    for model in (training.plain, reference):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
    for found, expected in zip(training.plain.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    for module in training.plain.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks and not module._forward_pre_hooks


# -- Opacus' other modes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grad_sample_mode", "module_type", "optimizer_type"),
    [
        ("hooks", GradSampleModule, DPOptimizer),
        ("functorch", GradSampleModule, DPOptimizer),
        ("ew", GradSampleModuleExpandedWeights, DPOptimizer),
        ("ghost", GradSampleModuleFastGradientClipping, DPOptimizerFastGradientClipping),
    ],
)
def test_other_modes_are_opacus_own(
    grad_sample_mode: str, module_type: type, optimizer_type: type
) -> None:
    options: dict[str, Any] = {
        "grad_sample_mode": grad_sample_mode,
        "poisson_sampling": False,
        "noise_multiplier": 1.0,
        "max_grad_norm": 0.5,
    }
    ours = Training(FlashPrivacyEngine(), **options)
    opacus = Training(PrivacyEngine(), **options)
    assert type(ours.wrapper) is type(opacus.wrapper) is module_type
    assert type(ours.optimizer) is type(opacus.optimizer) is optimizer_type
    assert type(ours.criterion) is type(opacus.criterion)
    assert_states_close(ours.steps(3), opacus.steps(3), 0.0)
    assert ours.engine.accountant.history == opacus.engine.accountant.history


def test_other_modes_keep_their_clipping_and_epsilon() -> None:
    options: dict[str, Any] = {"grad_sample_mode": "hooks", "poisson_sampling": False}
    per_layer = {**options, "clipping": "per_layer", "max_grad_norm": [0.2] * 10}
    assert_states_close(
        Training(FlashPrivacyEngine(), **per_layer).steps(2),
        Training(PrivacyEngine(), **per_layer).steps(2),
        0.0,
    )
    budget = {**options, "target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 1}
    ours = Training(FlashPrivacyEngine(), **budget)
    assert type(ours.wrapper) is GradSampleModule
    opacus = Training(PrivacyEngine(), **budget)
    assert ours.optimizer.noise_multiplier == opacus.optimizer.noise_multiplier


# -- one gradient, many ways to ask for it --------------------------------------------------------


def gradients(
    backward: Callable[[Any, Any, Tensor, Tensor], None],
    module_options: dict[str, Any] | None = None,
    reduction: str = "mean",
) -> tuple[list[Tensor], Tensor]:
    """Clipped sums and norms on one batch of the digits, float64."""
    dataset = digits()
    x, y = dataset.tensors[0][:16].double(), dataset.tensors[1][:16]
    model = GradSampleModuleFlashClipping(
        network().double(), max_grad_norm=0.5, loss_reduction=reduction, **(module_options or {})
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        expected_batch_size=16,
        loss_reduction=reduction,
    )
    backward(model, optimizer, x, y)
    return [param.grad for param in model.parameters()], model.get_norm_sample()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_way_to_backward_gives_the_same_gradient(reduction: str) -> None:
    def plain(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y, reduction=reduction).backward()

    def criterion(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss = nn.CrossEntropyLoss(reduction=reduction)
        FlashLoss(model, optimizer, loss, reduction)(model(x), y).backward()

    def opacus_criterion(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss = nn.CrossEntropyLoss(reduction=reduction)
        DPLossFastGradientClipping(model, optimizer, loss, reduction)(model(x), y).backward()

    def hand_written_ghost_loop(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        losses = F.cross_entropy(model(x), y, reduction="none")
        getattr(losses, reduction)().backward(retain_graph=True)
        optimizer.zero_grad()
        coef = model.get_clipping_coef()
        model.disable_hooks()
        (coef * losses).sum().backward()
        model.enable_hooks()

    expected, expected_norms = gradients(plain, reduction=reduction)
    for way in (criterion, opacus_criterion, hand_written_ghost_loop):
        found, norms = gradients(way, reduction=reduction)
        torch.testing.assert_close(norms, expected_norms, rtol=1e-12, atol=0)
        for grad, expected_grad in zip(found, expected, strict=True):
            torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-14)
    for way in (plain, criterion):
        found, norms = gradients(way, {"mode": "two_pass"}, reduction)
        torch.testing.assert_close(norms, expected_norms, rtol=1e-12, atol=0)
        for grad, expected_grad in zip(found, expected, strict=True):
            torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-14)


def test_loss_arithmetic_is_differentiated() -> None:
    def twice(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        criterion = FlashLoss(model, optimizer, nn.CrossEntropyLoss())
        output = model(x)
        (criterion(output, y) / 4 + 0.75 * criterion(output, y) + 1).backward()

    def once(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    for found, expected in zip(gradients(twice)[0], gradients(once)[0], strict=True):
        torch.testing.assert_close(found, expected)


@pytest.fixture
def opacus_samplers() -> Iterator[None]:
    before = dict(GradSampleHooksFastGradientClipping.NORM_SAMPLERS)
    yield
    GradSampleHooksFastGradientClipping.NORM_SAMPLERS.clear()
    GradSampleHooksFastGradientClipping.NORM_SAMPLERS.update(before)


@pytest.mark.usefixtures("opacus_samplers")
def test_registered_norm_samplers_make_opacus_ghost_right_for_4d_inputs() -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6, padding_idx=0)
            self.first = nn.Linear(6, 8)
            self.second = nn.Linear(8, 3, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(self.embed(ids)))).flatten(1)

    torch.manual_seed(0)
    model = Windows().double()
    ids = torch.randint(0, 11, (5, 3, 4))
    norms = []
    for b in range(5):
        model.zero_grad()
        model(ids[b : b + 1]).square().sum().backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    model.zero_grad()

    ghost = GradSampleModuleFastGradientClipping(model, max_grad_norm=0.5, loss_reduction="mean")
    register_flash_norm_samplers()
    losses = ghost(ids).square().sum(1)
    losses.mean().backward(retain_graph=True)
    torch.testing.assert_close(ghost.get_norm_sample(), torch.stack(norms))


@pytest.mark.usefixtures("opacus_samplers")
def test_registered_norm_samplers_in_an_existing_engine() -> None:
    options: dict[str, Any] = {"grad_sample_mode": "ghost", "poisson_sampling": False}
    before = Training(PrivacyEngine(), **options).steps(3)
    after = Training(PrivacyEngine(), **options)
    register_flash_norm_samplers()
    assert_states_close(after.steps(3), before)


# -- errors (each says what was found and what to do) ---------------------------------------------


def wrapped(model: nn.Module, **options: Any) -> GradSampleModuleFlashClipping:
    return GradSampleModuleFlashClipping(model, **options)


def test_error_norms_before_backward() -> None:
    module = wrapped(nn.Linear(4, 2))
    text = r"no per-sample norms yet: they are taken during backward\. Call the model, then "
    for ask in (module.get_norm_sample, module.get_clipping_coef):
        with pytest.raises(FlashClippingError, match=text + r"loss\.backward\(\)"):
            ask()
    module(torch.randn(3, 4))
    with pytest.raises(FlashClippingError, match=text):
        module.get_norm_sample()


class FoldedWindows(nn.Module):
    """Windows folded into the batch axis, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.windows = nn.Sequential(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        folded = x.unflatten(1, (2, -1)).flatten(0, 1)
        return self.windows(folded).unflatten(0, (-1, 2)).flatten(1)


@pytest.mark.parametrize("mode", MODES)
def test_error_windows_in_the_batch_axis(mode: str) -> None:
    module = wrapped(FoldedWindows(), mode=mode)
    with pytest.raises(
        FlashClippingError,
        match=r"windows\.0 \(Linear\): what it reads has 6 rows for a batch of 3, and 4 for a "
        r"batch of 2[^$]*Keep the batch the first axis .*register_rule",
    ):
        module(torch.randn(3, 8, 4))


@pytest.mark.parametrize("mode", MODES)
def test_error_layers_disagree_about_the_batch(mode: str) -> None:
    """Without a tensor input of the root there is nothing else to compare with."""

    class NoInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self) -> Tensor:
            return self.second(self.first(torch.ones(6, 4)).view(3, 2, 4))

    module = wrapped(NoInput(), mode=mode)
    output = module()
    with pytest.raises(
        FlashClippingError,
        match=r"first \(Linear\): found 6 samples along the batch axis, but second \(Linear\) "
        r"recorded 3 in the same backward",
    ):
        output.flatten(1).sum(1).mean().backward()


def test_error_parameters_on_another_device() -> None:
    module = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, device="meta")))
    with pytest.raises(
        FlashClippingError,
        match=r"1 \(Linear\): its parameters are on meta, but its input is on cpu\. Move the model "
        r"or the batch: module\.to\('cpu'\)",
    ):
        module(torch.randn(3, 4))


def test_error_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    with pytest.raises(
        NotImplementedError, match=r"1 \(BatchNorm2d\) mixes samples: .* nn\.GroupNorm .*fix"
    ):
        wrapped(model, strict=False)
    with pytest.raises(NotImplementedError, match=r"1 \(BatchNorm2d\) mixes samples"):
        wrapped(model)  # not that the layer has buffers
    with pytest.raises(UnsupportedModuleError, match="BatchNorm"):
        Training(FlashPrivacyEngine(), model=model)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize(
    ("layer", "x", "text"),
    [
        (
            nn.Embedding(5, 4, scale_grad_by_freq=True),
            torch.zeros(3, 2, dtype=torch.long),
            r"body\.0 \(Embedding\): .*mixes samples.* Set scale_grad_by_freq=False",
        ),
        (
            nn.EmbeddingBag(5, 4, mode="max"),
            torch.zeros(3, 2, dtype=torch.long),
            r"body\.0 \(EmbeddingBag\): .*mode='max'.* expected mode 'sum' or 'mean'",
        ),
        (
            nn.Conv2d(2, 4, 3),
            torch.zeros(2, 5, 5),
            r"body\.0 \(Conv2d\): .*expected an input of 4 dimensions, found shape \(2, 5, 5\).*"
            r"unsqueeze\(0\)",
        ),
    ],
    ids=["scale_grad_by_freq", "bag_max", "convolution"],
)
def test_error_of_a_rule_names_the_layer(layer: nn.Module, x: Tensor, text: str, mode: str) -> None:
    model = nn.ModuleDict({"body": nn.Sequential(copy.deepcopy(layer))})
    model.forward = lambda x: model["body"](x)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=text):
        wrapped(model, mode=mode)(x)


def test_error_of_an_attention_names_it_once() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    with pytest.raises(ValueError, match=r"attention .*expected a query of 3.*unsqueeze") as error:
        wrapped(Attending())(torch.zeros(3, 4))
    assert str(error.value).count("(MultiheadAttention)") == 1


class TransposedFirst(nn.Module):
    """Its data meet a bare parameter with the batch on the second axis."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.gain, self.table = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3, 1, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        x = x + self.table if self.kind == "added" else x * self.gain
        return x.transpose(0, 1) if self.kind == "last" else self.head(x.transpose(0, 1))


@pytest.mark.parametrize("batch_size", [5, 3])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "added",
            r"the model \(TransposedFirst\): what it reads has 3 rows[^$]*batch the first",
        ),
        (
            "multiplied",
            r"the model \(TransposedFirst\): what it reads has 3 rows[^$]*Keep the batch the first",
        ),
        ("last", r"the model \(TransposedFirst\): .*the batch as its first|the batch the first"),
    ],
)
def test_error_data_transposed_before_a_bare_parameter(
    kind: str, text: str, batch_size: int
) -> None:
    module = wrapped(TransposedFirst(kind))
    with pytest.raises(FlashClippingError, match=text):
        module(torch.randn(batch_size, 3, 4)).square().sum().backward()


def test_error_input_without_a_batch_axis() -> None:
    module = wrapped(nn.Sequential(nn.Linear(4, 2)), batch_first=False)
    with pytest.raises(
        FlashClippingError,
        match=r"0 \(Linear\): found an input of shape \(4,\), which has no batch axis; expected "
        r"\[batch, \.\.\.\]\. Add the axis with unsqueeze",
    ):
        module(torch.randn(4))


def test_error_reductions_do_not_match() -> None:
    module = wrapped(nn.Linear(4, 2), loss_reduction="mean")
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
        loss_reduction="mean",
    )
    text = r"The loss reductions do not match: .*criterion\.reduction='sum'.*'mean' or 'sum'"
    with pytest.raises(ValueError, match=text):
        FlashLoss(module, optimizer, nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(ValueError, match=r"module\.loss_reduction='mean'"):
        FlashLoss(module, optimizer, nn.CrossEntropyLoss(), "sum")


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (
            {"mode": "three_pass"},
            "mode='three_pass' is unknown; expected one of one_pass, two_pass",
        ),
        (
            {"backend": "cutlass"},
            "backend='cutlass' is unknown; expected one of auto, triton, torch",
        ),
        (
            {"clipping": "adaptive!"},
            "clipping='adaptive!' is unknown; expected one of flat, per_layer, automatic",
        ),
        ({"loss_reduction": "none"}, "loss_reduction='none' is unknown; expected 'mean' or 'sum'"),
    ],
)
def test_error_unknown_option(option: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        wrapped(nn.Linear(4, 2), **option)


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_error_grad_scaler(make_optimizer: Any, unscale_first: bool) -> None:
    """Norms and bounds would be those of scaled gradients: refused before any parameter moves."""
    training = Training(FlashPrivacyEngine(), make_optimizer, poisson_sampling=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = next(iter(training.loader))
    before = [p.detach().clone() for p in training.plain.parameters()]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(training.model(x), y)
    scaler.scale(loss).backward()
    if unscale_first:
        scaler.unscale_(training.optimizer)
    with pytest.raises(ValueError, match=r"GradScaler.* without the scaler"):
        scaler.step(training.optimizer)
    for was, param in zip(before, training.plain.parameters(), strict=True):
        assert torch.equal(was, param)


def test_disabled_grad_scaler_is_none() -> None:
    """Mixed-precision loops pass ``enabled=False`` where they do not scale."""
    found = Training(FlashPrivacyEngine(), poisson_sampling=False)
    expected = Training(FlashPrivacyEngine(), poisson_sampling=False)
    x, y = next(iter(found.loader))
    expected.step(x, y)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    found.optimizer.zero_grad()
    scaler.scale(found.criterion(found.model(x), y)).backward()
    scaler.unscale_(found.optimizer)
    scaler.step(found.optimizer)
    scaler.update()
    assert_states_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp16_autocast_without_a_scaler(dtype: torch.dtype) -> None:
    """Norms and sums are those of the gradients that autocast gives."""
    training = Training(FlashPrivacyEngine(), poisson_sampling=False, max_grad_norm=0.5)
    x, y = next(iter(training.loader))
    x, y = x[:16], y[:16]
    plain = network()
    rows = []
    for b in range(len(x)):
        plain.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = nn.functional.cross_entropy(plain(x[b : b + 1]), y[b : b + 1])
        loss.backward()
        rows.append(torch.cat([p.grad.flatten() for p in plain.parameters()]).double())
    truth = torch.stack(rows)
    with torch.autocast("cpu", dtype=dtype):
        loss = nn.functional.cross_entropy(training.model(x), y)
    loss.backward()
    norms = training.wrapper.get_norm_sample().double()
    tolerance = 8 * torch.finfo(dtype).eps
    assert ((norms - truth.norm(dim=1)).abs() <= tolerance * truth.norm(dim=1)).all()
    coef = (0.5 / truth.norm(dim=1)).clamp(max=1)
    clipped = (coef[:, None] * truth).sum(0)
    sums = torch.cat([p.grad.flatten() for p in training.plain.parameters()]).double()
    assert (sums - clipped).norm() <= tolerance * clipped.norm()


def test_error_unknown_grad_sample_mode() -> None:
    with pytest.raises(ValueError, match="flush"):
        Training(FlashPrivacyEngine(), grad_sample_mode="flush")


def test_error_per_layer_bounds() -> None:
    module = wrapped(nn.Linear(4, 2), clipping="per_layer", max_grad_norm=1.0)
    text = r"needs max_grad_norm to be a list with one bound per trainable parameter \(2\)"
    with pytest.raises(ValueError, match=text):
        module(torch.randn(3, 4)).sum(1).mean().backward()
    module = wrapped(nn.Linear(4, 2), max_grad_norm=[1.0, 2.0])
    with pytest.raises(ValueError, match="takes one max_grad_norm; found a list of 2"):
        module(torch.randn(3, 4)).sum(1).mean().backward()


@pytest.mark.parametrize("mode", MODES)
def test_error_gradient_that_bypasses_a_tap(mode: str) -> None:
    module = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), mode=mode)
    penalty = 0.1 * module._module[0].weight.square().sum()
    loss = module(torch.randn(3, 4)).square().sum(1).mean() + penalty
    with pytest.raises(
        FlashClippingError,
        match=r"0\.weight: this parameter received a gradient from outside the module that owns "
        r"it; it would be added without being clipped\. .*weight_decay",
    ):
        loss.backward()


def test_error_wrapped_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    module = wrapped(model)
    with pytest.raises(ValueError, match="Trying to add hooks twice"):
        wrapped(model)
    with pytest.raises(ValueError, match=r"wrapped already, with .*'mean'.* asks for .*'sum'"):
        Training(FlashPrivacyEngine(), model=module, loss_reduction="sum")


def test_error_second_backward_in_two_passes() -> None:
    module = wrapped(nn.Linear(4, 2), mode="two_pass")
    loss = module(torch.randn(3, 4)).square().sum(1).mean()
    loss.backward(retain_graph=True)
    with pytest.raises(
        FlashClippingError, match=r"mode='two_pass' has freed this forward's graph.*one_pass"
    ):
        loss.backward()


def test_wrapped_module_takes_the_engines_bound() -> None:
    """Noise for one bound beside clipping by another would break the promise."""
    module = wrapped(network(), max_grad_norm=100.0)
    training = Training(FlashPrivacyEngine(), model=module, max_grad_norm=0.01)
    training.steps(1)
    assert training.wrapper is module
    coef = (0.01 / (module.get_norm_sample() + 1e-6)).clamp(max=1)
    torch.testing.assert_close(module.get_clipping_coef(), coef)
    assert math.isclose(module.max_grad_norm, 0.01)


def test_model_that_runs_on_one_batch_size_only() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) * self.second(torch.cos(x).view(6, 4))

    torch.manual_seed(0)
    model, x = Fixed(), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    module = wrapped(model, loss_reduction="sum", max_grad_norm=1e6)
    module(x).sum().backward()
    assert module.get_norm_sample().shape == (6,)
    plain(x).sum().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
