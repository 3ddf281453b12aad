"""PEFT's LoRA of stacked experts (``target_parameters``), against autograd through PEFT itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.errors import raises

pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.rules import find_rule
from tests.rules.test_experts import (
    Experts,
    ExpertsWithBiases,
    block,
    inputs,
    some_to_none,
    to_one,
    twice_the_same,
)
from tests.support.autograd import check_by_autograd, squares
from tests.support.mixtures import language_loss, mixture, tokens
from tests.support.oracle import assert_close

pytestmark = pytest.mark.without_gate

BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def with_lora(model: nn.Module, parameters: list[str] = BOTH, **config: Any) -> Any:
    """In float64, with adapters that are no longer zero."""
    config = {"r": 2, "lora_alpha": 3, "target_modules": []} | config
    adapted = get_peft_model(model, LoraConfig(target_parameters=parameters, **config)).double()
    drawn(adapted)
    return adapted


def drawn(model: nn.Module) -> None:
    torch.manual_seed(3)
    for param in model.parameters():
        if param.requires_grad:
            nn.init.normal_(param, std=0.4)


def check(model: nn.Module, batch: tuple[Tensor, ...], **options: Any) -> None:
    check_by_autograd(model, batch, squares, **options)


@pytest.mark.parametrize("family", ["Mixtral", "GptOss", "DeepseekV3"])
def test_adapted_families_match_autograd(family: str) -> None:
    """Beside LoRA on attention, and a router that is trained in full."""
    router = "router" if family == "GptOss" else "gate"
    attention = ["q_a_proj"] if family == "DeepseekV3" else ["q_proj", "v_proj"]
    config = dict(target_modules=attention, modules_to_save=[router])
    model = with_lora(mixture(family), [f"mlp.{name}" for name in BOTH], **config)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert {"lora_A", "lora_B", "modules_to_save"} <= {p for n in trained for p in n.split(".")}
    check_by_autograd(model, tokens(), language_loss, tolerance=5e-7)


@pytest.mark.every_pair
@pytest.mark.parametrize("experts", [Experts, ExpertsWithBiases])
@pytest.mark.parametrize("parameters", [BOTH, BOTH[::-1], BOTH[:1], BOTH[1:]])
@pytest.mark.parametrize("T", [3, 40])
def test_adapted_blocks_match_autograd(experts: Any, parameters: list[str], T: int) -> None:
    check(with_lora(block(experts), parameters), inputs(4, T), tolerance=1e-9)


@pytest.mark.parametrize("route", [to_one, some_to_none, twice_the_same])
def test_routes_of_any_kind_match_autograd(route: Any) -> None:
    check(with_lora(block(ExpertsWithBiases, route), r=4), inputs(4, 5), tolerance=1e-9)
    check(with_lora(block(Experts, route), r=1), inputs(1, 30), tolerance=1e-9)


def test_several_adapters_match_autograd() -> None:
    model = with_lora(block())
    model.add_adapter("other", LoraConfig(r=3, target_parameters=BOTH, target_modules=[]))
    model.base_model.set_adapter(["default", "other"])
    drawn(model.double())
    check(model, inputs(3, 5))


def test_float32_adapters_beside_bfloat16() -> None:
    """As PEFT makes them by default."""
    model = block().bfloat16()
    model = get_peft_model(model, LoraConfig(r=4, target_parameters=BOTH, target_modules=[]))
    drawn(model)
    adapter = model.base_model.model.experts.lora_A["default"].weight
    wide = copy.deepcopy(model).double()
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1e9)
    (x,) = inputs(4, 30)
    loss = squares(lambda x: flash(x.bfloat16()).double(), (x,))
    loss.backward()
    squares(wide, (x.bfloat16().double(),)).backward()
    assert adapter.dtype == torch.float32 and adapter.grad.dtype == torch.float32
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert_close(param.grad, 4 * wide.get_parameter(name).grad, 0.1, name)


# -- adapters that are not what the forward computes with ------------------------------------------


def test_disabled_adapters_leave_the_base() -> None:
    """PEFT freezes what it disables: the model is then its base, and nothing is trained."""
    model = with_lora(block())
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    (x,) = inputs(3, 5)
    base = copy.deepcopy(model).unload()(x)
    with model.disable_adapter():
        assert_close(flash(x), base, 1e-12)
    squares(flash, (x,)).backward()
    assert all(p.grad.any() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("state", ["merged", "disabled", "not active"])
def test_weights_that_no_sample_reaches_are_refused(state: str) -> None:
    model = with_lora(block())
    if state == "merged":
        model.merge_adapter()
    elif state == "disabled":
        model.base_model.disable_adapter_layers()
    else:
        model.add_adapter("other", LoraConfig(r=3, target_parameters=BOTH, target_modules=[]))
        model.set_adapter("other")
    for name, param in model.named_parameters():
        if "lora" in name:
            param.requires_grad_()
    flash = GradSampleModuleFlashClipping(model.double())
    with raises("FC160", match="experts.*lora_A.default.weight"):
        squares(flash, inputs(3, 5)).backward()


def test_other_wrapped_parameters_have_no_rule() -> None:
    """A router's matrix, say: the router stands in for the weights of the adapter."""
    model = with_lora(block(), ["router.weight"])
    assert find_rule(model.base_model.model.router) is None
    check(model, inputs(3, 5))
