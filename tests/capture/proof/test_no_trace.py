"""Runs that leave no trace: what a model changes of itself is put back, nothing else touched."""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.no_trace import Holdings, untouched
from flash_clipping.capture.proof.repeatable import Repeatable, repeatable


class Frozen(OrderedDict[str, Any]):
    """Refuses every change once it is made, as the configuration of a diffusers model does."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.is_frozen = True

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("frozen")

    def __setitem__(self, key: str, value: Any) -> None:
        if getattr(self, "is_frozen", False):
            self._refuse()
        super().__setitem__(key, value)

    clear = update = pop = popitem = setdefault = __delitem__ = _refuse


class ReadOnly(list[Any]):
    def _refuse(self, *args: Any) -> Any:
        raise TypeError("read-only")

    __setitem__ = __delitem__ = append = extend = clear = copy = _refuse


class Counted(deque[Any]):
    def extend(self, _: Any) -> None:
        raise AssertionError("extended")


class Holder(nn.Module):
    """Holds ``value``, which ``change`` changes in forward."""

    def __init__(self, value: Any, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.value, self.change = nn.Linear(3, 2), value, change
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.last = self.calls + 1, x
        self.change(self.value)
        return self.linear(x)


def _reorder(value: OrderedDict[str, int]) -> None:
    value.move_to_end("a")


CONTAINERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "frozen": (Frozen(a=1, b=[2]), len),
    "frozen, changed inside": (Frozen(a=1, b=[2]), lambda value: value["b"].append(3)),
    "frozen, changed": (Frozen(a=1), lambda value: OrderedDict.__setitem__(value, "a", 2)),
    "read-only": (ReadOnly([1, 2]), len),
    "read-only, changed": (ReadOnly([1, 2]), lambda value: list.append(value, 3)),
    "order": (OrderedDict(a=1, b=2), _reorder),
    "defaultdict": (defaultdict(list, a=[1]), lambda value: value["b"].append(1)),
    "Counter": (Counter("aab"), lambda value: value.update("b")),
    "set": ({1, 2}, lambda value: value.add(3)),
    "deque": (Counted([1, 2], maxlen=2), lambda value: value.append(3)),
    "nested": ({"a": ([1], deque([{2}]))}, lambda value: value["a"][1][0].clear()),
    "tuple": (([1],), lambda value: value[0].clear()),
    "emptied": ({"a": 1, "b": {"c": 2}}, lambda value: value.clear()),
    "tensors": ([torch.ones(2)], lambda value: value.append(torch.ones(2))),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_put_back(name: str) -> None:
    value, change = CONTAINERS[name]
    model, before = Holder(value, change), repr(value)
    with untouched(model):
        model(torch.ones(1, 3))
    assert model.value is value and repr(value) == before
    assert model.calls == 0 and not hasattr(model, "last")


def test_a_forward_that_fails_is_put_back() -> None:
    def change(value: dict[str, Any]) -> None:
        value["a"].clear()
        value.clear()
        raise RuntimeError("failed")

    model = Holder({"a": [1]}, change)
    with pytest.raises(RuntimeError, match="failed"), untouched(model):
        model(torch.ones(1, 3))
    assert model.value == {"a": [1]}


@pytest.mark.parametrize("name", CONTAINERS)
def test_models_that_hold_containers_are_served(name: str) -> None:
    torch.manual_seed(0)
    value, _ = CONTAINERS[name]
    model, before = Holder(value, len), repr(value)
    x = torch.randn(4, 3)
    expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    options: dict[str, Any] = {"max_grad_norm": 1e6, "loss_reduction": "sum"}
    flash = GradSampleModuleFlashClipping(model, **options)
    flash(x).square().sum().backward()
    assert repr(value) == before
    for param, grads in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grads)


def test_nothing_of_a_look_is_kept() -> None:
    """What its runs have drawn is as large as the batch, and on its device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    flash(torch.randn(5, 3)).square().sum(1).mean().backward()
    assert flash._session.proof.kinds  # it was looked at
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x).__name__ == Repeatable.__name__]


def test_no_attention_is_planned_in_compared_runs() -> None:
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    before = enabled()
    with repeatable(Holdings(nn.Linear(2, 2)), [], seed=0):
        assert not enabled()
    assert enabled() == before
