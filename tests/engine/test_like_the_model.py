"""A wrapped model is used like the model: attributes, copies, exports."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from flash_clipping import (
    FlashClippingError,
    FlashLoss,
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
)
from flash_clipping.engine.optimizer import FlashDPOptimizer
from tests.support.errors import raises
from tests.support.hugging_face import gpt2
from tests.support.oracle import assert_close, per_sample_truth
from tests.support.pages import block
from tests.support.private import Private


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


@pytest.mark.parametrize("mode", ["one_pass", "two_pass", "one_by_one"])
@pytest.mark.parametrize("is_wrapper", [True, False])
@pytest.mark.filterwarnings("ignore:mode=:UserWarning")
def test_copies_of_the_model_inside_are_plain(is_wrapper: bool, mode: str) -> None:
    """They were taken between steps, of a copy of the wrapper as well; nothing else is changed."""
    model, x = Scaled(), torch.randn(5, 3)
    kind = GradSampleModuleFlashClipping if is_wrapper else GradSampleHooksFlashClipping
    private = kind(model, max_grad_norm=0.1, loss_reduction="sum", mode=mode)

    def backward(of: nn.Module) -> Tensor:
        of.zero_grad(set_to_none=True)
        of(x).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in of.parameters() if p.grad is not None])

    clipped = backward(model)
    truth = Scaled()
    truth.load_state_dict(model.state_dict())
    plain = backward(truth)
    inside = [model]
    if is_wrapper:
        inside.append(copy.deepcopy(private)._module)
    for module in inside:
        for twin in (copy.deepcopy(module), AveragedModel(module).module):
            assert type(twin) is Scaled and twin._compiled_call_impl is None
            assert {*vars(twin)} - {*vars(truth)} <= {"_compiled_call_impl"}
            assert not twin._forward_hooks and not twin._forward_pre_hooks
            assert torch.equal(backward(twin), plain)
            assert torch.equal(backward(copy.deepcopy(twin)), plain)
        torch.testing.assert_close(backward(module), clipped)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass", "one_by_one"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.filterwarnings("ignore:mode=:UserWarning")
def test_a_model_may_change_its_dtype_between_steps(dtype: torch.dtype, mode: str) -> None:
    """Afterwards all is as if it had been converted first; the plain model has its gradients."""
    x, model, other = torch.randn(5, 3), Scaled(), Scaled()
    private = GradSampleModuleFlashClipping(model, max_grad_norm=0.1, mode=mode)
    private(x).sum().backward()
    private.zero_grad(set_to_none=True)
    private.to(dtype)
    other.to(dtype).load_state_dict(model.state_dict())
    first = GradSampleModuleFlashClipping(other, max_grad_norm=0.1, mode=mode)
    for each in (private, first):
        each(x.to(dtype)).square().sum().backward()
    assert torch.equal(private.get_norm_sample(), first.get_norm_sample())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert p.dtype == dtype and p.grad.dtype == q.grad.dtype
        assert torch.equal(p.grad, q.grad)
    private.zero_grad(set_to_none=True)
    private.to_standard_module()(x.to(dtype)).sum().backward()
    assert {p.grad_dtype for p in model.parameters()} == {dtype}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}


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
    assert wrapped._session.mode.enabled
    output.loss.backward()
    norms = wrapped.get_norm_sample()
    assert norms.shape == (3,)
    wrapped.zero_grad()
    wrapped(input_ids=tokens, labels=tokens).loss.backward()
    assert torch.equal(norms, wrapped.get_norm_sample())


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
    with raises("FC303", TypeError, match=r"found CausalLMOutput.*expected logits"):
        criterion(type(wrapped(tokens))(), labels)


def test_a_layer_set_on_the_wrapper_is_refused() -> None:
    wrapped = GradSampleModuleFlashClipping(Scaled())
    wrapped.linear = nn.Linear(3, 2)
    with raises("FC170"):
        wrapped(torch.ones(2, 3))


def stepped(**options: Any) -> Private:
    private = Private(**options)
    private.step()
    return private


EXPORTS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "torch.export": lambda model, x: torch.export.export(model, (x,)).module()(x),
    "trace": lambda model, x: torch.jit.trace(model, x)(x),
    "script": lambda model, x: torch.jit.script(model)(x),
    "onnx": lambda model, x: torch.onnx.export(model, (x,), io.BytesIO(), dynamo=False),
}


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_names_the_plain_model(name: str, inner: bool) -> None:
    """Two of them ended the process."""
    private = stepped()
    model: Any = private.model
    x = next(iter(private.loader))[0]
    with raises(
        "FC430", (FlashClippingError, AttributeError), match=r"to_standard_module\(\)"
    ) as e:
        EXPORTS[name](model._module if inner else model, x)
    names: dict[str, Any] = {"copy": copy, "model": model}
    exec(str(e.value).splitlines()[-1].strip(), names)
    if name != "onnx":  # whose package may be missing
        found = EXPORTS[name](names["plain"], x)
        torch.testing.assert_close(found, model.eval()(x))
        model.train()
    private.step()  # the private model trains on


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    private = stepped()
    x = next(iter(private.loader))[0]
    names: dict[str, Any] = {
        "model": private.model,
        "optimizer": private.optimizer,
        "engine": private.engine,
        "x": x,
    }
    for marker in ("a copy", "weights", "formats", "report"):
        exec(block(f"tested: {marker}", "docs/export.md"), names)
    with torch.no_grad():
        expected = names["plain"](x)
    torch.testing.assert_close(names["program"].module()(x), expected)
    torch.testing.assert_close(names["traced"](x), expected)
    saved = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert [*saved] == [*names["plain"].state_dict()]
    assert not any(key.startswith("_module.") for key in saved)
    assert all(type(value) is Tensor for value in saved.values())
    private.step()
