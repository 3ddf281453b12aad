"""Bases that are kept in fewer bits, multiplied in fp8, loaded late or spread over devices: exact
against one sample at a time, or refused with the line that works."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.engine.unsupported import refuse_unsupported
from tests.support.autograd import (
    TOLERANCE,
    check_by_autograd,
    check_truth,
    truth_by_autograd,
)
from tests.support.errors import raises
from tests.support.wrapping import MODES

pytestmark = pytest.mark.without_gate

#: Of a product whose base is in float32 and has no other dtype.
FLOAT32 = 2e-6

D = 64


def needs(package: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed")


BITSANDBYTES, TORCHAO = needs("bitsandbytes"), needs("torchao")


class Adapted(nn.Module):
    """A frozen layer and a low-rank way around it, as LoRA has it."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(D, 3, bias=False), nn.Linear(3, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Model(nn.Module):
    """Two adapted layers, between which gradients go back through a base."""

    def __init__(self, make: Callable[[nn.Linear], nn.Module], bias: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, D)
        self.layers = nn.ModuleList(Adapted(make(nn.Linear(D, D, bias=bias))) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def sum_of_losses(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    rows: Tensor = model(*batch).flatten(1)
    return (rows.square() * torch.linspace(0.5, 1.5, rows.shape[1])).sum() / rows.shape[1]


def mean_of_losses(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return sum_of_losses(model, batch) / len(batch[0])


def ids() -> tuple[Tensor, ...]:
    return (torch.randint(0, 9, (5, 4)),)


# -- frozen, in fewer bits -------------------------------------------------------------------------


def four_bits(linear: nn.Linear, **options: Any) -> nn.Module:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(D, D, bias=linear.bias is not None, compute_dtype=torch.float32)
    layer.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, **options)
    return _with_bias(layer, linear)


def eight_bits(linear: nn.Linear) -> nn.Module:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear8bitLt(D, D, bias=linear.bias is not None, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(
        linear.weight.data, requires_grad=False, has_fp16_weights=False
    )
    return _with_bias(layer, linear)


def _with_bias(layer: Any, linear: nn.Linear) -> nn.Module:
    if linear.bias is not None:
        layer.bias.data = linear.bias.data
    layer.support_avx512bf16_for_cpu = False
    quantized: nn.Module = layer.to("cpu")
    return quantized


def by_torchao(config: str) -> Callable[[nn.Linear], nn.Module]:
    def make(linear: nn.Linear) -> nn.Module:
        from torchao import quantization

        quantization.quantize_(linear, getattr(quantization, config)())
        assert type(linear.weight) is not nn.Parameter
        return linear

    return make


class Scaled(nn.Module):
    """A weight of 8 bits and a scale for each row."""

    def forward(self, rounded: Tensor, scale: Tensor) -> Tensor:
        return rounded.to(scale.dtype) * scale

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return (weight / scale).round().to(torch.int8), scale


def parametrized(linear: nn.Linear) -> nn.Module:
    linear.double().requires_grad_(False)
    parametrize.register_parametrization(linear, "weight", Scaled(), unsafe=True)
    return linear


BASES = [
    pytest.param(lambda x: four_bits(x, quant_type="nf4"), id="nf4", marks=BITSANDBYTES),
    pytest.param(
        lambda x: four_bits(x, quant_type="fp4", compress_statistics=False),
        id="fp4",
        marks=BITSANDBYTES,
    ),
    pytest.param(eight_bits, id="8 bits", marks=BITSANDBYTES),
    pytest.param(by_torchao("Int8WeightOnlyConfig"), id="int8", marks=TORCHAO),
    pytest.param(
        by_torchao("Int8DynamicActivationInt8WeightConfig"), id="int8 rows", marks=TORCHAO
    ),
    pytest.param(by_torchao("Float8WeightOnlyConfig"), id="float8", marks=TORCHAO),
    pytest.param(parametrized, id="parametrized"),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", BASES)
def test_adapters_of_a_base_in_fewer_bits(make: Any, mode: str) -> None:
    model = Model(make)
    if make is parametrized:
        check_by_autograd(model.double(), ids(), mean_of_losses, mode=mode)
    else:
        check_by_autograd(model, ids(), mean_of_losses, mode=mode, tolerance=FLOAT32)


@pytest.mark.filterwarnings("ignore:FC180")
@pytest.mark.parametrize("mode", [*MODES, "one_by_one"])
@pytest.mark.parametrize("make", [base for base in BASES if base.values[0] is not parametrized])
def test_the_bias_of_a_base_in_fewer_bits(make: Any, mode: Any) -> None:
    """``LoraConfig(bias="all")``: everything of the base that is no weight; refused where the
    layer is a function of bitsandbytes' own."""
    model = Model(make, bias=True)
    for layer in model.layers:
        layer.base.bias.requires_grad_(True)
    if mode != "one_by_one" and type(model.layers[0].base).__module__.startswith("bitsandbytes"):
        flash = GradSampleModuleFlashClipping(model, mode=mode)
        with raises("FC140", match=r"layers.0.base.*\n(.*\n)*.*one_by_one"):
            mean_of_losses(flash, ids()).backward()
        return
    check_by_autograd(model, ids(), mean_of_losses, mode=mode, tolerance=FLOAT32)
    assert all(type(layer.base.bias) is nn.Parameter for layer in model.layers)


def test_a_base_of_8_bits_that_looks_at_all_rows_is_refused() -> None:
    """bitsandbytes' layers by name, so that this runs without it."""
    kind = type("Linear8bitLt", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    layer = kind(D, D, bias=False)
    layer.state = SimpleNamespace(threshold=6.0)
    model = Model(lambda linear: copy.deepcopy(layer))
    with raises(
        "FC904", NotImplementedError, match="layers.0.base .*llm_int8_threshold=6.0"
    ) as error:
        GradSampleModuleFlashClipping(model)
    for layer in model.layers[1:]:
        layer.base.state.threshold = 0.0
    exec(str(error.value).splitlines()[-1].strip(), {"model": model})
    refuse_unsupported(model)
    model.layers[1].base.weight.requires_grad_(True)
    with raises("FC903", NotImplementedError, match="layers.1.base") as error:
        GradSampleModuleFlashClipping(model)
    exec(str(error.value).splitlines()[-1].strip(), {"model": model})
    refuse_unsupported(model)


@BITSANDBYTES
def test_a_base_in_8_bits_takes_samples_one_by_one() -> None:
    """It moves its numbers from its weight to an object in the first forward."""
    model, batch = Model(eight_bits), ids()
    alone, expected = copy.deepcopy(model), []
    for b in range(len(batch[0])):
        alone.zero_grad()
        sum_of_losses(alone, (batch[0][b : b + 1],)).backward()
        grads = [p.grad.flatten() for p in alone.parameters() if p.grad is not None]
        expected.append(torch.cat(grads).norm())
    flash = GradSampleModuleFlashClipping(model, loss_reduction="sum", mode="one_by_one")
    for _ in range(2):
        flash.zero_grad()
        sum_of_losses(flash, batch).backward()
        torch.testing.assert_close(flash.get_norm_sample(), torch.stack(expected))


@TORCHAO
def test_activations_that_are_rounded_together_are_refused() -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, PerTensor, quantize_

    model = Model(nn.Identity)
    model.layers[1].base = nn.Sequential(nn.Linear(D, D)).requires_grad_(False)
    quantize_(model.layers[1].base, Int8DynamicActivationInt8WeightConfig(granularity=PerTensor()))
    with raises("FC902", NotImplementedError, match="layers.1.base.0 .*PerTensor"):
        GradSampleModuleFlashClipping(model)


@BITSANDBYTES
def test_4_bits_that_lose_gradients_after_an_evaluation_are_refused() -> None:
    model = Model(four_bits)
    GradSampleModuleFlashClipping(model).to_standard_module()
    model.layers[1].base.support_avx512bf16_for_cpu = True
    with raises("FC901", NotImplementedError, match="layers.1.base") as error:
        GradSampleModuleFlashClipping(model)
    exec(str(error.value).splitlines()[-1].strip(), {"model": model})
    GradSampleModuleFlashClipping(model).to_standard_module()
    model.layers[0].base.weight.quant_state.packing_format_for_cpu = True  # too late
    with raises("FC901", NotImplementedError, match="layers.0.base"):
        GradSampleModuleFlashClipping(model)


# -- products in fp8 -------------------------------------------------------------------------------


def in_fp8(recipe: str, **options: Any) -> Callable[[nn.Linear], nn.Module]:
    def make(linear: nn.Linear) -> nn.Module:
        from dataclasses import replace

        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, **options)
        outer = nn.Sequential(linear)
        return convert_to_float8_training(outer, config=config)[0]

    return make


@TORCHAO
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_training_in_fp8(bias: bool, trained: bool, mode: str) -> None:
    """In float64 what is rounded to fp8 is the same, whoever else is in the batch."""
    model = Model(in_fp8("rowwise_with_gw_hp"), bias).double()
    if trained:
        model.requires_grad_(True)
    check_by_autograd(model, ids(), sum_of_losses, mode=mode, loss_reduction="sum")


@TORCHAO
@pytest.mark.parametrize(
    ("recipe", "trained", "found"),
    [
        ("tensorwise", True, "cast_config_input with tensorwise"),
        ("tensorwise", False, "cast_config_input with tensorwise"),
        ("rowwise", True, "cast_config_input_for_grad_weight with axiswise"),
    ],
)
def test_scales_of_all_samples_are_refused(recipe: str, trained: bool, found: str) -> None:
    model = Model(in_fp8(recipe))
    model.layers[1].base.requires_grad_(trained)
    with raises("FC902", NotImplementedError, match=rf"layers.\d.base .*{found}.*\n.*_with_gw_hp"):
        GradSampleModuleFlashClipping(model)


@TORCHAO
def test_a_mean_in_fp8_is_refused() -> None:
    """One over the size of the batch is no power of two: what is rounded changes with it."""
    model = Model(in_fp8("rowwise_with_gw_hp"))
    flash = GradSampleModuleFlashClipping(model)
    with raises("FC905", match="layers.0.base"):
        mean_of_losses(flash, ids()).backward()
    assert all(param.grad is None for param in model.parameters())
    with flash.summed_loss():  # as the criterion of make_private
        sum_of_losses(flash, ids()).backward()
    assert flash.get_norm_sample().shape == (5,)


# -- elsewhere, or not there yet -------------------------------------------------------------------


def test_parameters_without_values_are_refused() -> None:
    """Loading makes other parameters than the optimizer and the wrapper know."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    state = copy.deepcopy(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))).state_dict()
    with raises("FC125", match=r"0.weight: .*\n.*to_empty") as error:
        GradSampleModuleFlashClipping(model)
    exec(str(error.value).splitlines()[-1].strip(), {"model": model, "state": state})
    batch = (torch.randn(3, 4, dtype=torch.float64),)
    check_by_autograd(model.double(), batch, mean_of_losses)
    model[0] = nn.Linear(4, 4, device="meta").requires_grad_(False)
    with raises("FC125", match="0.weight.*a parameter without values"):
        GradSampleModuleFlashClipping(model)


def dispatched(model: nn.Module, places: dict[str, str], folder: Path) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    spread: nn.Module = accelerate.dispatch_model(
        model,
        places,
        main_device="cpu",
        offload_dir=folder,
        force_hooks=True,
        offload_buffers=True,
    )
    return spread


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_base_that_is_spread_by_a_device_map(place: str, mode: str, tmp_path: Path) -> None:
    """Frozen modules may be loaded for every forward, and their neighbours trained."""
    model = Model(nn.Identity).double()
    for layer in model.layers:
        layer.base = nn.Linear(D, D, dtype=torch.float64).requires_grad_(False)
    model.layers[0].base.register_buffer("scale", torch.rand(D))  # which is loaded as well
    plain = copy.deepcopy(model)
    places = {name: "cpu" for name, child in model.named_modules() if not [*child.children()]}
    dispatched(model, places | {"layers.0.base": place}, tmp_path)
    assert model.layers[0].base.weight.is_meta == (place == "disk")
    batch = ids()
    truth = truth_by_autograd(plain, batch, mean_of_losses)
    bound = truth.norms.median().item()
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=bound, mode=mode)
    for _ in range(2):
        flash.zero_grad(set_to_none=True)
        mean_of_losses(flash, batch).backward()
        check_truth(flash, model, truth, bound, TOLERANCE)


def test_what_is_trained_may_not_be_offloaded(tmp_path: Path) -> None:
    model = Model(nn.Identity)
    dispatched(model, {"embed": "cpu", "layers.0": "disk", "layers.1": "cpu"}, tmp_path)
    with raises("FC125", match=r"layers.0.down.weight: .*Accelerate.*\n.*device_map"):
        GradSampleModuleFlashClipping(model)
