"""A wrapped model of transformers answers as the model does."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import FlashClippingError, FlashLoss, GradSampleModuleFlashClipping
from flash_clipping.engine.optimizer import FlashDPOptimizer
from tests.support.hugging_face import gpt2
from tests.support.oracle import assert_close, per_sample_truth


class Scaled(nn.Module):
    """A model with an attribute, a property and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.factor = 1.0

    @property
    def width(self) -> int:
        return 3

    @property
    def broken(self) -> int:
        return self.nothing  # type: ignore[return-value]

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * x

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.linear(x)


@pytest.fixture
def scaled() -> tuple[GradSampleModuleFlashClipping, Scaled]:
    model = Scaled()
    return GradSampleModuleFlashClipping(model), model


def test_attributes_are_the_models(scaled: tuple[GradSampleModuleFlashClipping, Scaled]) -> None:
    wrapped, model = scaled
    assert (wrapped.width, wrapped.factor) == (3, 1.0)
    assert wrapped.doubled(torch.ones(1)) == 2
    assert wrapped.linear is model.linear
    assert {"doubled", "factor", "get_norm_sample"} <= {*dir(wrapped)}
    for name in ("nothing", "broken"):
        with pytest.raises(AttributeError, match=f"around Scaled has no attribute '{name}'"):
            getattr(wrapped, name)


def test_setting_what_only_the_model_has(
    scaled: tuple[GradSampleModuleFlashClipping, Scaled],
) -> None:
    wrapped, model = scaled
    x = torch.ones(2, 3)
    before = wrapped(x)
    wrapped.factor = 3.0
    wrapped.strict, wrapped.of_nobody = True, 1
    assert model.factor == 3.0
    assert not hasattr(model, "strict") and not hasattr(model, "of_nobody")
    assert torch.equal(wrapped(x), 3 * before)


def test_copies_and_pickles_are_wrapped(
    scaled: tuple[GradSampleModuleFlashClipping, Scaled],
) -> None:
    wrapped, model = scaled
    model.__dict__["__deepcopy__"] = lambda memo: model  # the model's, not the wrapper's
    assert not hasattr(wrapped, "__deepcopy__")
    del model.__dict__["__deepcopy__"]
    for twin in (copy.deepcopy(wrapped), copy.copy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert type(twin) is GradSampleModuleFlashClipping
        assert twin.width == 3
    assert repr(wrapped) == f"GradSampleModuleFlashClipping({model!r})"
    assert wrapped.eval() is wrapped and not model.training and not wrapped.training


def test_hooks_come_and_go(scaled: tuple[GradSampleModuleFlashClipping, Scaled]) -> None:
    wrapped, model = scaled
    wrapped.remove_hooks()
    wrapped.add_hooks()
    wrapped(torch.ones(2, 3)).sum().backward()
    assert wrapped.to_standard_module() is model
    assert not hasattr(model, "autograd_grad_sample_hooks")


def test_state_dicts_of_either_form(scaled: tuple[GradSampleModuleFlashClipping, Scaled]) -> None:
    wrapped, model = scaled
    assert [*wrapped.state_dict()] == ["_module.linear.weight", "_module.linear.bias"]
    other = Scaled()
    for states in (other.state_dict(), GradSampleModuleFlashClipping(Scaled()).state_dict()):
        wrapped.load_state_dict(states)
        assert torch.equal(model.linear.weight, [*states.values()][0])
    part = {"linear.weight": torch.zeros(2, 3), "more": torch.zeros(1)}
    with pytest.raises(RuntimeError, match='Missing key.*"linear.bias"'):
        wrapped.load_state_dict(part)
    found = wrapped.load_state_dict(part, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["linear.bias"], ["more"])
    assert not model.linear.weight.any()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        wrapped.load_state_dict({**wrapped.state_dict(), "more": torch.zeros(1)})


def test_state_dict_of_a_model_with_a_module_of_the_wrappers_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._module = nn.Linear(2, 2)

    wrapped = GradSampleModuleFlashClipping(Named())
    for states in (Named().state_dict(), GradSampleModuleFlashClipping(Named()).state_dict()):
        wrapped.load_state_dict(states)
        assert torch.equal([*wrapped.parameters()][0], [*states.values()][0])


def test_a_model_of_transformers(tmp_path: Path) -> None:
    model = gpt2()
    wrapped = GradSampleModuleFlashClipping(model)
    assert wrapped.config is model.config
    assert (wrapped.device, wrapped.dtype) == (model.device, torch.float64)
    assert wrapped.get_input_embeddings() is model.transformer.wte
    assert wrapped.num_parameters() == model.num_parameters()
    wrapped.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    wrapped.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config.n_embd == 8
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize("training", [False, True])
def test_generate_leaves_no_trace(training: bool) -> None:
    """Between forward and backward, in a step."""
    model = gpt2().train(training)
    plain = copy.deepcopy(model)
    wrapped = GradSampleModuleFlashClipping(model)
    tokens = torch.randint(17, (3, 4))
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    output = wrapped(input_ids=tokens, labels=tokens)
    generated = wrapped.generate(tokens, **settings)
    assert torch.equal(generated, plain.generate(tokens, **settings))
    assert wrapped._session.enabled
    output.loss.backward()
    norms = wrapped.get_norm_sample()
    assert norms.shape == (3,)
    wrapped.zero_grad()
    wrapped(input_ids=tokens, labels=tokens).loss.backward()
    assert torch.equal(norms, wrapped.get_norm_sample())


def test_generate_goes_past_the_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs nothing per layer, and is right again when it fails."""
    wrapped = GradSampleModuleFlashClipping(gpt2().eval())
    seen: list[bool] = []
    forward = type(wrapped._module).prepare_inputs_for_generation

    def prepare(self: object, *args: object, **kwargs: object) -> object:
        seen.append(wrapped._session.enabled)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(wrapped._module), "prepare_inputs_for_generation", prepare)
    wrapped.generate(torch.randint(17, (2, 3)), max_new_tokens=2, pad_token_id=0)
    assert seen == [False, False]
    with pytest.raises(ValueError):
        wrapped.generate(torch.randint(17, (2, 3)), max_new_tokens=-1)
    assert wrapped._session.enabled


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("named", [False, True])
def test_the_criterion_takes_an_output_of_transformers(reduction: str, named: bool) -> None:
    """README's loop, on samples of different lengths."""
    model = gpt2()
    tokens, labels = torch.randint(17, (4, 8)), torch.randint(17, (4, 8))
    for b, length in enumerate((1, 8, 3, 5)):
        labels[b, length:] = -100

    def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        logits = model(batch[0]).logits
        losses_T = nn.functional.cross_entropy(logits[0], batch[1][0], reduction="none")
        total = losses_T.sum()[None]
        return total / (batch[1] != -100).sum() if reduction == "mean" else total

    truth = per_sample_truth(model, (tokens, labels), losses)
    wrapped = GradSampleModuleFlashClipping(model, loss_reduction=reduction)
    optimizer = FlashDPOptimizer(
        torch.optim.SGD(model.parameters()),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
        loss_reduction=reduction,
    )
    criterion = FlashLoss(wrapped, optimizer, nn.CrossEntropyLoss(reduction=reduction), reduction)
    given = {"target": labels} if named else {}
    criterion(wrapped(tokens), *(() if named else (labels,)), **given).backward()
    assert_close(wrapped.get_norm_sample(), truth.norms, 1e-9)
    with pytest.raises(TypeError, match=r"found CausalLMOutput.*expected logits"):
        criterion(type(wrapped(tokens))(), labels)


def test_targets_by_name_are_counted() -> None:
    """Opacus would divide by the padded length, which depends on the others."""
    model = gpt2()
    tokens, labels = torch.randint(17, (2, 8)), torch.randint(17, (2, 8))
    labels[0, 2:] = -100
    wrapped = GradSampleModuleFlashClipping(model)
    optimizer = FlashDPOptimizer(
        torch.optim.SGD(model.parameters()),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=2,
    )
    criterion = FlashLoss(wrapped, optimizer, nn.CrossEntropyLoss())
    found = []
    for by_name in (False, True):
        logits = wrapped(tokens).logits
        flat, target, shape = logits.flatten(0, 1), labels.flatten(), logits.shape
        if by_name:
            loss = criterion(flat, target=target, shape=shape)
        else:
            loss = criterion(flat, target, shape=shape)
        found.append(loss.loss_per_sample.detach())
    assert torch.equal(*found)


def test_a_layer_set_on_the_wrapper_is_refused() -> None:
    wrapped = GradSampleModuleFlashClipping(Scaled())
    wrapped.linear = nn.Linear(3, 2)
    with pytest.raises(FlashClippingError, match="came after the model was wrapped"):
        wrapped(torch.ones(2, 3))
