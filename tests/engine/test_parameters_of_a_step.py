"""Parameters that come, go, are frozen or replaced: known to the wrapper, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.errors import raises
from tests.support.private import SLACK, Private, Released, TwoLayers, data


def test_parameters_that_the_wrapper_does_not_know(released: Released) -> None:
    """Were released as they were: 29 at a bound of 0.01."""
    private = Private(max_grad_norm=0.01)
    extra = nn.Linear(6, 3)
    with raises("FC170", ValueError, match="add_param_group.*.3, 6."):
        private.optimizer.add_param_group({"params": extra.parameters()})
    for group in (
        private.optimizer.original_optimizer.add_param_group,
        private.optimizer.param_groups.append,
    ):
        group({"params": [*nn.Linear(6, 3).parameters()], "lr": 0.1})
    x, y = (part[:1] for part in data().tensors)
    extra_layers = private.optimizer.param_groups[1]["params"]
    F.cross_entropy(private.model(x) + F.linear(x, *extra_layers), y).backward()
    with raises("FC170", ValueError):
        private.optimizer.step()
    assert not released.releases


def test_parameters_that_are_unfrozen_later_may_be_added(released: Released) -> None:
    model = TwoLayers()
    model.head.requires_grad_(False)
    private = Private(model, parameters=[*model.body.parameters()])
    private.step()
    model.head.requires_grad_(True)
    private.optimizer.add_param_group({"params": [*model.head.parameters()]})
    before = model.head.weight.detach().clone()
    private.step()
    assert released.ratio() <= SLACK
    assert len(released.sums[-1]) == 4 and not torch.equal(before, model.head.weight)


def replace_head(private: Private) -> None:
    private.plain.head = nn.Linear(8, 3)


def replace_nested(private: Private) -> None:
    private.plain.body[0] = nn.Linear(6, 8)


def insert_nested(private: Private) -> None:
    private.plain.body.insert(1, nn.LayerNorm(8))


def put_on_the_wrapper(private: Private) -> None:
    private.wrapper.head = nn.Linear(8, 3)


def late_parameter(private: Private) -> None:
    private.plain.body[1].gain = nn.Parameter(torch.ones(8))


def parametrize(private: Private) -> None:
    nn.utils.parametrizations.weight_norm(private.plain.head)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (replace_head, r"head \(Linear\): its parameter 'weight' came after"),
        (replace_nested, r"body\.0 \(Linear\): its parameter 'weight' came after"),
        (insert_nested, r"body\.1 \(LayerNorm\): its parameter 'weight' came after"),
        (put_on_the_wrapper, r"head \(Linear\): its parameter 'weight' came after"),
        (late_parameter, r"body\.1 \(Tanh\): its parameter 'gain' came after"),
        (parametrize, r"head\.parametrizations\.weight .*came after the model was wrapped"),
    ],
)
def test_layers_that_come_after_wrapping(
    change: Callable[[Private], None], text: str, mode: str
) -> None:
    private = Private(mode=mode)
    private.step()
    change(private)
    with raises("FC170", match=text):
        private.step()


@pytest.mark.parametrize("wrap_model", [True, False])
def test_a_parameter_that_the_first_forward_makes(wrap_model: bool) -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "gain"):
                self.gain = nn.Parameter(torch.ones(8))
            return x * self.gain

    model = TwoLayers()
    model.body.append(Late())
    private = Private(model, wrap_model=wrap_model)
    with raises("FC170", match=r"body\.2 \(Late.*'gain' came"):
        private.backward()


def test_lazy_modules_are_refused_when_they_are_wrapped() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with raises("FC113", NotImplementedError, match=r"0 \(LazyLinear\):"):
        GradSampleModuleFlashClipping(model)


def test_what_has_no_trainable_parameter_may_come_and_go(released: Released) -> None:
    private = Private()
    private.plain.body[1] = nn.ReLU()
    frozen = nn.Linear(3, 3).requires_grad_(False)
    private.plain.after = frozen
    private.wrapper.metric = nn.Identity()
    private.step()
    assert released.ratio() <= SLACK
    frozen.requires_grad_(True)
    with raises("FC170", match=r"after \(Linear\)"):
        private.plain.body.append(nn.Identity())
        private.step()


def test_a_parameter_of_a_known_layer_may_be_replaced(released: Released) -> None:
    """Its tap looks at what the layer has; the optimizer must have it as well."""
    private = Private()
    private.plain.head.weight = nn.Parameter(torch.randn(3, 8) * 1e3)
    private.backward()
    with raises("FC170", ValueError, match=r"\(3, 8\)"):
        private.optimizer.step()
    private.optimizer.param_groups[0]["params"] = [*private.plain.parameters()]
    private.step()
    assert released.ratio() <= SLACK
