"""A Poisson batch without samples: no forward, zero sums, noise only; for any model and loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.layers import DPLSTM
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flash_clipping import (
    FlashClippingError,
    FlashPrivacyEngine,
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
    per_sample_loss,
)
from flash_clipping.capture.no_samples import CollateWithEmpty
from tests.support.empty import CLASSES, ReshapingAttention, T
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


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", MODELS)
def test_any_model_any_mode(name: str, mode: Any, wrap: bool) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    cls = GradSampleModuleFlashClipping if wrap else GradSampleHooksFlashClipping
    hooks: Any = cls(model, max_grad_norm=C, mode=mode)
    called = hooks if wrap else model
    for size in (0, 3, 0):
        hooks.zero_grad(set_to_none=True) if wrap else model.zero_grad(set_to_none=True)
        output = called(torch.rand(size, *shape) + 0.1)
        assert output.shape == (size, CLASSES)
        F.cross_entropy(output, torch.zeros(size, dtype=torch.long)).backward()
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
        state = torch.random.get_rng_state()
        inputs = batch(size)
        outputs = model(**inputs)
        assert outputs.logits.shape[0] == size
        loss = outputs.loss
        if name == "t5" and size:  # a mean over the labels of all samples
            with pytest.raises(FlashClippingError, match="per_sample_loss"):
                loss.backward()
            loss = per_sample_loss(outputs, inputs["labels"]).mean()
        loss.backward()
        if size == 0:
            assert outputs.loss.item() == 0.0
            assert torch.equal(torch.random.get_rng_state(), state)
            check_nothing_but_zeros(hooks, model)
        else:
            assert hooks.get_norm_sample().shape == (2,) and hooks.get_norm_sample().all()


def test_arguments_can_still_be_chosen_by_the_models_signature() -> None:
    """Trainers drop the columns that ``forward`` does not name."""
    import inspect

    model = ReshapingAttention()
    before = inspect.signature(model.forward)
    hooks = GradSampleHooksFlashClipping(model, mode="two_pass")
    assert inspect.signature(model.forward) == before
    hooks.remove_hooks()
    hooks = GradSampleHooksFlashClipping(model)
    assert inspect.signature(model.forward) == before


class Counting(nn.Module):
    """Writes a buffer and an attribute in forward, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        hidden = F.dropout(self.linear(x), 0.5)
        return {"parts": (hidden, [hidden[:, :1]]), "n": len(x), "rows": hidden.repeat(3, 1)}


def test_made_up_samples_leave_no_trace() -> None:
    model = GradSampleModuleFlashClipping(Counting(), max_grad_norm=C)
    state = torch.random.get_rng_state()
    output = model(torch.zeros(0, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model._module.calls == 0
    assert output["n"] == 0 and output["rows"].shape == (0, 2)
    assert output["parts"][0].shape == (0, 2) and output["parts"][1][0].shape == (0, 1)
    with torch.no_grad():
        assert model(torch.zeros(0, 4))["n"] == 0  # as the model itself has it
    assert model._module.calls == 1


class RunsOnNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0 or bool((x == x.flatten()[0]).all()):
            raise ValueError("constant input")
        return self.linear(x)


def test_a_model_that_runs_on_nothing_made_up_is_refused_by_name() -> None:
    model = GradSampleModuleFlashClipping(nn.Sequential(RunsOnNothing()), max_grad_norm=C)
    with pytest.raises(FlashClippingError, match="without samples.*constant input"):
        model(torch.zeros(0, 4))
    model(torch.randn(3, 4)).sum().backward()
    assert model.get_norm_sample().shape == (3,)


class RunsOnNone(RunsOnNothing):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) else self.linear(x)


@pytest.mark.parametrize("generic", [False, True])
def test_a_model_that_runs_on_no_samples_only(generic: bool) -> None:
    options: dict[str, Any] = {"max_grad_norm": C, "force_functorch": generic}
    model = GradSampleModuleFlashClipping(nn.Sequential(RunsOnNone()), **options)
    for size in (3, 0):
        model.zero_grad()
        output = model(torch.randn(size, 4))
        assert output.shape == (size, 2)
        output.sum().backward()
        assert model.get_norm_sample().shape == (size,)
    check_nothing_but_zeros(model, model._module)


def test_bags_that_are_all_empty_are_samples() -> None:
    model = GradSampleModuleFlashClipping(nn.EmbeddingBag(5, 2, mode="sum"), max_grad_norm=C)
    none = torch.zeros(0, dtype=torch.long)
    assert model(none, torch.zeros(3, dtype=torch.long)).shape == (3, 2)
    assert model(none, none).shape == (0, 2)


# -- through the engine ---------------------------------------------------------------------------


def private(
    model: nn.Module, shape: tuple[int, ...], **options: Any
) -> tuple[nn.Module, Any, Any, Any, FlashPrivacyEngine]:
    """Training in which most batches are empty."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, *shape, generator=generator)
    data = TensorDataset(x, torch.randint(0, CLASSES, (12,), generator=generator))
    engine = FlashPrivacyEngine(accountant="rdp")
    options = {"noise_multiplier": 1.0, "max_grad_norm": C} | options
    module, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=1),
        **options,
    )
    return module, optimizer, criterion, loader, engine


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
        sizes.append(len(x))
        optimizer.step()
        sums = torch.cat([summed.flatten() for summed in noted[-1]])
        assert bool(sums.any()) == (len(x) > 0)
        noisy = torch.cat([p.grad.flatten() for p in optimizer.params])
        if not len(x):
            std = C * (len(optimizer.params) ** 0.5 if clipping == "per_layer" else 1)
            assert 0.8 * std < noisy.std() < 1.2 * std
    assert sizes.count(0) >= 2 and any(sizes)
    assert engine.accountant.history == [(1.0, pytest.approx(1 / 12), 12)]


def test_virtual_steps_and_an_empty_logical_batch() -> None:
    torch.manual_seed(2)
    module, optimizer, criterion, loader, engine = private(ReshapingAttention(), (T, 8))
    empty = 0
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=1, optimizer=optimizer
    ) as batches:
        for x, y in batches:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
            empty += not len(x)
    assert empty >= 1
    assert engine.accountant.history == [(1.0, pytest.approx(1 / 12), 12)]


def test_accumulated_backwards_one_of_them_empty() -> None:
    def sums(sizes: list[int]) -> Tensor:
        torch.manual_seed(0)
        module, optimizer, criterion, *_ = private(
            ReshapingAttention(), (T, 8), poisson_sampling=False
        )
        optimizer.zero_grad()
        for size in sizes:
            generator = torch.Generator().manual_seed(5)
            x = torch.randn(size, T, 8, generator=generator)
            criterion(module(x), torch.zeros(size, dtype=torch.long)).backward()
        return torch.cat([p.grad.flatten() for p in optimizer.params])

    torch.testing.assert_close(sums([3, 0]), sums([3]))
    torch.testing.assert_close(sums([0, 3]), sums([3]))


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_two_calls_in_one_backward(mode: Any) -> None:
    """An empty call beside another: norms are those of the other."""
    torch.manual_seed(0)
    model = GradSampleModuleFlashClipping(ReshapingAttention(), max_grad_norm=C, mode=mode)
    x = torch.randn(3, T, 8)
    model(x).sum().backward()
    norms, expected = model.get_norm_sample(), [p.grad.clone() for p in model.parameters()]
    for first, second in ((x, x[:0]), (x[:0], x)):
        model.zero_grad()
        (model(first).sum() + model(second).sum()).backward()
        torch.testing.assert_close(model.get_norm_sample(), norms)
        for param, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, grad)


def test_adaptive_clipping_is_moved_by_noise_alone() -> None:
    """A bound that stayed where it is would tell that the batch was empty."""
    torch.manual_seed(2)
    module, optimizer, criterion, loader, _ = private(
        ReshapingAttention(),
        (T, 8),
        clipping="adaptive",
        noise_multiplier=0.01,
        target_unclipped_quantile=0.5,
        min_clipbound=1e-3,
        max_clipbound=10.0,
        clipbound_learning_rate=0.3,
    )
    empty = 0
    for x, y in loader:
        before = optimizer.max_grad_norm
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
        if not len(x):
            # As if half of the expected batch were within: the count's noise is 1/20 of that batch.
            moved = abs(math.log(optimizer.max_grad_norm / before))
            assert 0 < moved < 0.3 * 6 / 20
            assert all(torch.isfinite(p).all() for p in module.parameters())
            empty += 1
        assert optimizer.max_grad_norm == module.max_grad_norm != before
    assert empty >= 2


# -- collate functions ----------------------------------------------------------------------------


@dataclass
class Item:
    x: Tensor
    names: list[str]


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Fails on no samples; takes its samples apart."""
    longest = max(len(sample["ids"]) for sample in samples)
    labels = [sample.pop("label") for sample in samples]
    ids = [F.pad(sample["ids"], (0, longest - len(sample["ids"]))) for sample in samples]
    return {
        "ids": torch.stack(ids),
        "steps": torch.stack(ids, 1),
        "label": torch.tensor(labels),
        "count": len(samples),
        "item": Item(torch.stack(ids).float(), [str(label) for label in labels]),
        "numpy": torch.stack(ids).numpy(),
        "kind": "text",
    }


class Texts(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": torch.arange(4 + index), "label": index}


def test_a_batch_of_no_samples_has_the_structure_of_the_others() -> None:
    """The first batch too."""
    batch = CollateWithEmpty(padded, Texts())([])
    assert batch["ids"].shape == (0, 4) and batch["ids"].dtype == torch.int64
    assert batch["steps"].shape == (4, 0)
    assert batch["label"].shape == (0,) and batch["count"] == 0 and batch["kind"] == "text"
    assert batch["item"].x.shape == (0, 4) and batch["item"].names == []
    assert batch["numpy"].shape == (0, 4)


def test_a_structure_that_holds_samples_nobody_knows_where_is_refused() -> None:
    def collate(samples: list[Any]) -> Any:
        return {"set": {(i, len(samples)) for i in range(len(samples))}}

    with pytest.raises(TypeError, match="without samples.*collate.*set"):
        CollateWithEmpty(collate, Texts())([])
