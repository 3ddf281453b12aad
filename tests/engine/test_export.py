"""Exports of a private model: they work, or an error says how; ``docs/export.md`` runs."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import FlashClippingError
from tests.support.errors import raises
from tests.support.pages import block
from tests.support.private import Private

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


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


def test_a_trace_without_gradients_is_of_the_model() -> None:
    private = stepped()
    x = next(iter(private.loader))[0]
    private.model.eval()
    with torch.no_grad():
        traced = torch.jit.trace(private.model._module, x)
        torch.testing.assert_close(traced(x), private.model(x))


@pytest.mark.parametrize("wrap_model", [True, False])
def test_members_of_what_is_returned_can_be_listed(wrap_model: bool) -> None:
    private = Private(wrap_model=wrap_model)
    for _ in range(2):
        for made in (private.wrapper, private.model, private.criterion, private.loader):
            assert {"__class__"} < {name for name, _ in inspect.getmembers(made)}
        private.step()


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
