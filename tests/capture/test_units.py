"""``unit=Documents(...)``: samples that are users, of which a batch holds any number of rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import Documents, GradSampleModuleFlashClipping
from tests.support.autograd import float64s
from tests.support.cases import make_case
from tests.support.mixtures import mixture, tokens
from tests.support.models import CASES, squared_loss
from tests.support.oracle import assert_close
from tests.support.units import check_units, index_for, network, truth_by_unit
from tests.support.wrapping import MODES

pytestmark = pytest.mark.without_gate

# -- exact, whatever the layers and the map --------------------------------------------------------


MAPS = {
    "interleaved": (0, 1, 0, 1, 0, 1, 0),
    "each its own": (0, 1, 2, 3, 4, 5, 6),
    "in another order": (3, 6, 0, 1, 5, 2, 4),
    "one unit": (0,) * 7,
    "many rows and one": (0, 0, 0, 1, 0, 0, 0),
    "rows of none": (-1, 1, -1, 0, 0, 1, -1),
    "a unit without rows": (0, 3, 3, 1, 0, 1, 1),
}


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MAPS)
def test_every_map(name: str, reduction: str, mode: str) -> None:
    index = torch.tensor(MAPS[name])
    check_units(
        network(), float64s(7, 5, 4), squared_loss, index, reduction=reduction, mode=mode, steps=2
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_dtypes_of_maps(dtype: torch.dtype) -> None:
    index = torch.tensor([1, 0, 1, 2, 0, 1, 1], dtype=dtype)
    check_units(network(), float64s(7, 5, 4), squared_loss, index)


def test_number_that_is_told() -> None:
    """Units that have no row in the batch have a norm of 0."""
    flash = check_units(network(), float64s(7, 5, 4), squared_loss, told=5)
    assert flash.get_norm_sample()[3:].tolist() == [0, 0]
    assert flash.get_clipping_coef().shape == (5,)


def test_the_model_reads_the_map() -> None:
    """A parameter of this name gets the tensor, also by its place."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, user: Tensor | None = None) -> Tensor:
            assert user is not None
            return self.layer(x) * (1 + user[:, None])

    class Around(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    torch.manual_seed(1)
    x, index = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1])
    norms = []
    for make, arguments in (
        (Reading, {"user": index}),
        (Reading, {}),
        (lambda: Around(Reading()), {"user": index}),
    ):
        flash = GradSampleModuleFlashClipping(make(), unit=Documents("user"), loss_reduction="sum")
        by_place = () if arguments else (index,)
        flash(x, *by_place, **arguments).square().sum().backward()
        norms.append(flash.get_norm_sample())
    assert norms[0].shape == (2,)
    assert torch.equal(norms[0], norms[1]) and torch.equal(norms[0], norms[2])


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_experts(family: str) -> None:
    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        return model(*batch).logits.square().flatten(1).sum(1)

    # Parts of these models compute in fp32 whatever their dtype.
    check_units(mixture(family), tokens(7, 5), loss, tolerance=1e-6)


COMPILED = ["embedding", "conv2d_groups", "parameter_proxies"]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str) -> None:
    torch._dynamo.reset()
    model, batch = make_case(CASES[name], torch.float64)

    def compiled(flash: Any) -> None:
        flash.compile(backend="eager", fullgraph=True)

    check_units(
        model, batch, CASES[name].loss, plain=copy.deepcopy(model), prepare=compiled, steps=2
    )
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("of_map", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["linear_3d", "conv2d_groups", "embedding_padding", "mixed"])
def test_on_a_gpu(name: str, of_map: str) -> None:
    """A map on the CPU says how many units there are; one on the GPU, that there are no more than
    rows."""
    case = CASES[name]
    model, batch = make_case(case, torch.float64)
    index = index_for(len(batch[0]))
    count = int(index.max()) + 1
    truth = truth_by_unit(copy.deepcopy(model), batch, index, case.loss, count)
    flash = GradSampleModuleFlashClipping(model.cuda(), max_grad_norm=1.0, unit=Documents("user"))

    def with_units(*args: Tensor) -> Any:
        return flash(*args, user=index.to(of_map))

    case.loss(with_units, tuple(x.cuda() for x in batch)).mean().backward()  # type: ignore[arg-type]
    norms = flash.get_norm_sample().cpu()
    assert len(norms) == (count if of_map == "cpu" else len(index))
    assert_close(norms[:count], truth.norms, 1e-9, "norms")
    assert not norms[count:].any()
    for param_name, expected in truth.clipped(1.0).items():
        assert_close(model.get_parameter(param_name).grad.cpu(), expected, 1e-8, param_name)


# -- the scale, and what an infinite row does ------------------------------------------------------


def test_the_mean_is_over_rows() -> None:
    """A row's own gradient does not depend on how many units there are."""
    model, x = network(), torch.randn(6, 5, 4, dtype=torch.float64)
    norms = []
    for index in ([0, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5], [0, -1, -1, -1, -1, -1]):
        flash = GradSampleModuleFlashClipping(model, unit=Documents("user"))
        flash(x, user=torch.tensor(index)).square().flatten(1).sum(1).mean().backward()
        norms.append(flash.get_norm_sample()[0].item())
        flash.remove_hooks()
        model.zero_grad()
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["linear_3d", "conv2d_groups", "embedding", "layer_norm", "mixed"])
def test_a_unit_with_an_infinite_row(name: str, mode: str) -> None:
    """It adds nothing, and its other rows do not either; the others are not harmed."""
    case = CASES[name]
    model, batch = make_case(case, torch.float64)
    rows = len(batch[0])
    index = torch.tensor([0, 1, 0, 2, 1][:rows])
    count = int(index.max()) + 1
    truth = truth_by_unit(model, batch, index, case.loss, count)
    flash = GradSampleModuleFlashClipping(
        model, max_grad_norm=1.0, unit=Documents("user"), mode=mode
    )

    def with_units(*args: Tensor) -> Any:
        return flash(*args, user=index)

    factor = torch.ones(rows, dtype=torch.float64)
    factor[0] = torch.inf
    (case.loss(with_units, batch) * factor).mean().backward()
    coef = flash.get_clipping_coef()
    assert coef[0] == 0
    assert torch.isfinite(flash.get_norm_sample()[1:]).all()
    for param_name, grads in truth.grads.items():
        expected = torch.einsum("u,u...->...", coef[1:], grads[1:])
        found = model.get_parameter(param_name).grad
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["linear_3d", "conv2d_groups", "embedding_bag_sum"])
def test_removing_a_unit(name: str) -> None:
    """The sum changes by at most C, though the unit has several rows."""
    case = CASES[name]
    model, batch = make_case(case, torch.float32)
    index = index_for(len(batch[0]))
    C = 0.1

    def released(keep: Tensor) -> Tensor:
        flash = GradSampleModuleFlashClipping(model, max_grad_norm=C, unit=Documents("user"))
        numbers = index[keep].unique(return_inverse=True)[1]
        numbers = numbers.masked_fill(index[keep] < 0, -1) - int((index[keep] < 0).any())
        numbers = numbers.clamp(min=-1)

        def with_units(*args: Tensor) -> Any:
            return flash(*args, user=numbers)

        flash.set_grad_sample_to_none()
        model.zero_grad(set_to_none=True)
        with flash.summed_loss():
            case.loss(with_units, tuple(x[keep] for x in batch)).sum().mul(100).backward()
        sums = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        flash.remove_hooks()
        return sums.double()

    everyone = torch.ones(len(index), dtype=torch.bool)
    all_of_them = released(everyone)
    for unit in index.unique().tolist():
        change = (all_of_them - released(index != unit)).norm()
        if unit >= 0:
            assert C * 0.5 < change <= C * (1 + 1e-4), unit
        else:
            assert change <= 1e-6
