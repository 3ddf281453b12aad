"""A Poisson batch without samples: one row that moves nothing; for any model and loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.layers import DPLSTM
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import (
    AdaptiveBound,
    FlashPrivacyEngine,
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
    per_sample_loss,
)
from flash_clipping.capture.draws import DrawnBatch, Draws
from flash_clipping.trainers.dashboard import ClippingStatistics
from tests.support.draws import drawn
from tests.support.empty import CLASSES, ReshapingAttention, T
from tests.support.errors import raises
from tests.support.sums import note_sums

pytestmark = pytest.mark.without_gate

C = 0.5


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = DPLSTM(8, 5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Lengths(nn.Module):
    """Runs on no batch of 0, and on no length of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = DPLSTM(8, 5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = x.sum((1, 2)).abs().long().clamp(max=T)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
    )


#: Model, and one sample of its input.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (ReshapingAttention, (T, 8)),
    "encoder": (Encoder, (T, 8)),
    "dp_lstm": (Recurrent, (T, 8)),
    "packed": (Lengths, (T, 8)),
    "conv": (conv, (1, 6, 6)),
    "root_is_a_layer": (lambda: nn.Linear(8, CLASSES), (8,)),
}


def check_nothing_but_zeros(hooks: Any, model: nn.Module) -> None:
    assert hooks.get_norm_sample().shape == (0,)
    assert hooks.get_clipping_coef().shape[-1] == 0
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        assert param.grad is not None and param.grad.shape == param.shape, name
        assert not param.grad.any(), name


@pytest.mark.every_pair
@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", ["one_pass", "two_pass", "one_by_one"])
@pytest.mark.parametrize("name", MODELS)
def test_any_model_any_mode(name: str, mode: Any, wrap: bool) -> None:
    """Also where the row, and its gradient, are not finite."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    cls = GradSampleModuleFlashClipping if wrap else GradSampleHooksFlashClipping
    hooks: Any = cls(model, max_grad_norm=C, mode=mode)
    called = hooks if wrap else model
    for size in (0, 3, 0):
        hooks.zero_grad(set_to_none=True) if wrap else model.zero_grad(set_to_none=True)
        hooks.expect_samples(size)
        x = torch.rand(max(1, size), *shape) + 0.1
        if size == 0 and name != "packed":
            x = x * torch.tensor(float("nan"))
        output = called(x)
        assert output.shape == (len(x), CLASSES)
        F.cross_entropy(output, torch.zeros(len(x), dtype=torch.long)).backward()
        if size == 0:
            check_nothing_but_zeros(hooks, model)
        else:
            assert hooks.get_norm_sample().shape == (3,) and hooks.get_norm_sample().all()
    x = torch.rand(2, *shape) + 0.1
    hooks.remove_hooks()
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))  # its own forward again


def hugging_face(name: str) -> tuple[nn.Module, Callable[[int], dict[str, Tensor]]]:
    transformers = pytest.importorskip("transformers")
    ids = {"input_ids": (T,), "attention_mask": (T,)}
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=20, n_positions=8, n_embd=16, n_layer=1, n_head=2
        )
        model, inputs = transformers.GPT2LMHeadModel(config), ids | {"labels": (T,)}
    elif name == "bert":
        config = transformers.BertConfig(vocab_size=20, intermediate_size=16, **small)
        model, inputs = transformers.BertForSequenceClassification(config), ids | {"labels": ()}
    elif name == "t5":
        config = transformers.T5Config(
            vocab_size=20,
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
        model, inputs = transformers.T5ForConditionalGeneration(config), ids | {"labels": (T,)}
        for path, module in model.named_modules():  # reads positions, which are no samples
            if path.endswith("relative_attention_bias"):
                module.requires_grad_(False)
    else:
        config = transformers.ViTConfig(image_size=8, patch_size=4, intermediate_size=16, **small)
        model = transformers.ViTForImageClassification(config)
        inputs = {"pixel_values": (3, 8, 8), "labels": ()}

    def batch(size: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        made = {
            key: torch.randint(0, 2, (size, *shape), generator=generator)
            for key, shape in inputs.items()
        }
        if "attention_mask" in made:
            made["attention_mask"] = torch.ones_like(made["attention_mask"])
        if "pixel_values" in made:
            made["pixel_values"] = made["pixel_values"].float()
        return made

    return model, batch


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit"])
def test_a_model_that_returns_its_own_loss(name: str, mode: Any) -> None:
    torch.manual_seed(0)
    model, batch = hugging_face(name)
    hooks = GradSampleHooksFlashClipping(model.train(), max_grad_norm=C, mode=mode)
    for size in (0, 2, 0):
        model.zero_grad()
        hooks.expect_samples(size)
        inputs = batch(max(1, size))
        outputs = model(**inputs)
        assert outputs.logits.shape[0] == max(1, size)
        loss = outputs.loss
        if name == "t5":  # a mean over the labels of all samples
            with raises("FC440", match="per_sample_loss"):
                loss.backward()
            loss = per_sample_loss(outputs, inputs["labels"]).mean()
        loss.backward()
        if size == 0:
            assert math.isfinite(outputs.loss.item())  # the row's own, where loops log it
            check_nothing_but_zeros(hooks, model)
        else:
            assert hooks.get_norm_sample().shape == (2,) and hooks.get_norm_sample().all()


@pytest.mark.parametrize("mode", ["one_pass", "two_pass", "one_by_one"])
def test_a_batch_without_rows_is_refused_by_name(mode: Any) -> None:
    model = GradSampleModuleFlashClipping(nn.Linear(4, 2), max_grad_norm=C, mode=mode)
    with raises("FC250"):
        model(torch.zeros(0, 4))
    with torch.no_grad():
        assert model(torch.zeros(0, 4)).shape == (0, 2)  # as the model itself has it
    model(torch.randn(3, 4)).sum().backward()
    assert model.get_norm_sample().shape == (3,)


def test_bags_that_are_all_empty_are_samples() -> None:
    model = GradSampleModuleFlashClipping(nn.EmbeddingBag(5, 2, mode="sum"), max_grad_norm=C)
    none = torch.zeros(0, dtype=torch.long)
    assert model(none, torch.zeros(3, dtype=torch.long)).shape == (3, 2)
    with raises("FC250"):
        model(none, none)


# -- through the engine ---------------------------------------------------------------------------


def private(
    model: nn.Module, shape: tuple[int, ...], workers: int = 0, **options: Any
) -> tuple[nn.Module, Any, Any, Any, FlashPrivacyEngine]:
    """Training in which most draws are empty; the row that is given then is not finite."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, *shape, generator=generator)
    x[0] = torch.inf
    data = TensorDataset(x, torch.randint(0, CLASSES, (12,), generator=generator))
    engine = FlashPrivacyEngine(accountant="rdp")
    options = {"noise_multiplier": 1.0, "max_grad_norm": C} | options
    module, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=1, num_workers=workers),
        **options,
    )
    return module, optimizer, criterion, loader, engine


def is_empty(module: Any) -> bool:
    """Whether the batch that was given last has no samples."""
    return not drawn(module)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_noise_only(mode: str, clipping: str) -> None:
    torch.manual_seed(2)
    model = ReshapingAttention()
    bound: Any = [C] * 4 if clipping == "per_layer" else C
    module, optimizer, criterion, loader, engine = private(
        model, (T, 8), mode=mode, clipping=clipping, max_grad_norm=bound
    )
    sizes, noted = [], note_sums(optimizer)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        sizes.append(0 if is_empty(module) else len(x))
        assert len(x) == max(1, sizes[-1])
        optimizer.step()
        sums = torch.cat([summed.flatten() for summed in noted[-1]])
        assert bool(sums.any()) == bool(sizes[-1] and x.isfinite().flatten(1).all(1).any())
        noisy = torch.cat([p.grad.flatten() for p in optimizer.params])
        if not sizes[-1]:
            std = C * (len(optimizer.params) ** 0.5 if clipping == "per_layer" else 1)
            assert 0.8 * std < noisy.std() < 1.2 * std
    assert sizes.count(0) >= 2 and any(sizes)
    assert engine.accountant.history == [(1.0, pytest.approx(1 / 12), 12)]


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_two_calls_in_one_backward(mode: Any) -> None:
    """Two of the row that stands for a draw are served; one beside samples is refused."""
    torch.manual_seed(0)
    model = GradSampleModuleFlashClipping(ReshapingAttention(), max_grad_norm=C, mode=mode)
    x = torch.randn(3, T, 8)
    model.expect_samples(0)
    (model(x[:1]).sum() + model(x[1:2]).sum()).backward()
    check_nothing_but_zeros(model, model._module)
    for sizes in ((1, 0), (0, 1)):
        model.zero_grad()
        loss = torch.zeros(())
        for size in sizes:
            model.expect_samples(size)
            loss = loss + model(x[: max(1, size)]).sum()
        with raises("FC275"):
            loss.backward()


def test_adaptive_clipping_is_moved_by_noise_alone() -> None:
    """A bound that stayed where it is would tell that the batch was empty."""
    torch.manual_seed(2)
    module, optimizer, criterion, loader, _ = private(
        ReshapingAttention(),
        (T, 8),
        clipping=AdaptiveBound(0.5, 1e-3, 10.0, clipbound_learning_rate=0.3),
        noise_multiplier=0.01,
    )
    empty = 0
    for x, y in loader:
        before = optimizer.max_grad_norm
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        was_empty = is_empty(module)
        optimizer.step()
        if was_empty:
            # As if half of the expected batch were within: the count's noise is 1/20 of that batch.
            moved = abs(math.log(optimizer.max_grad_norm / before))
            assert 0 < moved < 0.3 * 6 / 20
            assert all(torch.isfinite(p).all() for p in module.parameters())
            empty += 1
        assert optimizer.max_grad_norm == module.max_grad_norm != before
    assert empty >= 2


def test_no_statistic_counts_the_row() -> None:
    module, optimizer, criterion, loader, _ = private(ReshapingAttention(), (T, 8))
    seen, samples, empty = ClippingStatistics(module), 0, 0
    for x, y in loader:
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        samples += drawn(module)
        empty += is_empty(module)
        seen.note_backward()
        optimizer.step()
    assert seen.read().samples == samples and empty


# -- loops that could take the row for a sample ----------------------------------------------------


def draws_given(*samples: int) -> Draws:
    draws = Draws()
    for number, count in enumerate(samples):
        draws.give(DrawnBatch(number, count, max(1, count)))
    return draws


@pytest.mark.parametrize("samples", [(1, 0), (0, 1), (5, 1, 0), (1, 0, 1)])
def test_a_row_that_may_be_a_sample_or_nobodys_is_refused(samples: tuple[int, ...]) -> None:
    """Batches left out, or taken ahead."""
    draws = draws_given(*samples)
    x = torch.zeros(1, 4)
    with raises("FC251"):
        draws.of_forward([x], 0)
    with raises("FC251"):
        draws.next()


def test_a_row_of_a_batch_that_is_over_is_refused() -> None:
    """Batches were kept in a list, and come a second time."""
    draws = draws_given(0, 1)
    for draw in draws.waiting:
        draw.used = draw.taken = draw.stepped = True
    with raises("FC251"):
        draws.of_forward([torch.zeros(1, 4)], 0)
    draws.waiting = []
    with raises("FC251"):
        draws.of_forward([torch.zeros(1, 4)], 0)
    assert draws.of_forward([torch.zeros(3, 4)], 0) is None


def test_batches_ahead_whose_rows_tell_are_served() -> None:
    draws = draws_given(4, 0, 7)
    for size, number in ((4, 0), (1, 1), (7, 2)):
        found = draws.of_forward([torch.zeros(size, 4)], 0)
        assert found is not None and found.number == number
        found.taken = True


# -- loaders ---------------------------------------------------------------------------------------


def test_workers_of_another_loader_are_refused_a_draw_without_samples() -> None:
    """Nobody would tell the model that their row is nobody's."""
    module, optimizer, criterion, loader, _ = private(ReshapingAttention(), (T, 8), workers=2)
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer)
    with (
        manager as batches,
        raises("FC253"),
    ):
        for x, y in batches:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
