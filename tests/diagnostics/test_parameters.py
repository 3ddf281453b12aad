"""What ``check`` says about a parameter: algorithm, backend, kind of factor, why none."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from flash_clipping.diagnostics import check
from flash_clipping.diagnostics.other_batches import OtherBatches
from flash_clipping.ops import linear
from flash_clipping.ops.runtime import backend as backends
from tests.support.diagnosed import of, statuses
from tests.support.models import CASES


class Linear(nn.Module):
    """Two linear layers of chosen sizes, so that the cost model has something to decide."""

    def __init__(self, d: int, p: int):
        super().__init__()
        self.one, self.two = nn.Linear(d, p), nn.Linear(p, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


@pytest.mark.parametrize(
    ("algorithm", "shape", "p", "mode"),
    [
        ("rank_one", (3, 8), 8, "one_pass"),
        ("gram", (3, 2, 64), 64, "one_pass"),
        ("outer_store", (3, 64, 16), 16, "one_pass"),
        ("outer", (3, 64, 16), 16, "two_pass"),  # which stores nothing
    ],
)
def test_algorithm_of_a_linear_layer_is_the_one_that_ran(
    algorithm: str, shape: tuple[int, ...], p: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: set[str] = set()

    def spy(module: ModuleType, name: str, label: Callable[[tuple[Any, ...]], str]) -> None:
        original = getattr(module, name)

        def spied(*args: Any, **kwargs: Any) -> Any:
            # The second layer has 2 output features.
            leaves = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            sizes = {leaf.shape[-1] for leaf in leaves if leaf.dim()}
            if p in sizes and 2 not in sizes:
                ran.add(label(args))
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, spied)

    def operation(args: tuple[Any, ...]) -> str:
        """What ``backend.run`` was asked for; the outer kernel's last argument is ``store``."""
        kind = args[0].__name__.partition("_")[0]
        return "outer_store" if kind == "outer" and args[-1] is True else kind

    spy(linear, "rank_one_sqnorms", lambda args: "rank_one")
    spy(backends, "run", operation)
    # The proof before a first step of training has an algorithm of its own.
    monkeypatch.setattr(OtherBatches, "_stand_proof", lambda self: None)
    report = check(Linear(shape[-1], p), torch.randn(shape), removals=0, mode=mode)
    assert report.passed, str(report)
    weight = of(report, "one.weight")
    assert weight.algorithm == algorithm
    assert ran & {"rank_one", "gram", "outer", "outer_store"} == {algorithm}
    assert weight.rule == "LinearRule" and weight.backend == "torch"


def test_kinds_of_factors() -> None:
    report = check(CASES["mixed"].make(), CASES["mixed"].batch(), removals=0)
    found = {parameter.name: parameter.algorithm for parameter in report.parameters}
    assert found["embed.weight"] == "lookup"
    assert found["conv.weight"] == "convolution"
    assert found["norm.weight"] == found["conv.bias"] == "vector"
    assert of(report, "blocks.0.scale.gain").rule in ("generic", "bare")

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embed(ids)))

    report = check(Tied(), torch.randint(0, 11, (4, 7)), dtype=torch.float64)
    assert report.passed, str(report)
    assert of(report, "embed.weight").algorithm == "tied"
    assert of(report, "embed.weight").rule == "LinearRule + EmbeddingRule"


@pytest.mark.skipif(not backends.is_interpreting(), reason="needs Triton's interpreter")
def test_backend_is_the_one_asked_for() -> None:
    model, x = Linear(16, 16), torch.randn(2, 16, 16)
    report = check(model, x, backend="triton", removals=0)
    assert report.passed, str(report)
    assert of(report, "one.weight").algorithm == "outer_store"
    assert of(report, "one.bias").algorithm == "vector"
    broken = {name for name, _ in backends._broken}
    expected = "torch" if "outer_sqnorms" in broken else "triton"
    assert of(report, "one.weight").backend == expected
    assert of(check(model, x, backend="torch", removals=0), "one.weight").backend == "torch"


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_bare_parameter_passes(reentrant: bool, mode: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = checkpoint(lambda y: (y * self.scale).tanh(), x, use_reentrant=reentrant)
            return self.last(x)

    report = check(Scaled(), torch.randn(3, 4), mode=mode)
    assert report.passed, report.failures


@pytest.mark.skipif(not backends.is_interpreting(), reason="needs Triton's interpreter")
def test_a_kernel_that_failed_is_not_called_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_broken", {("outer_sqnorms", torch.float32)})
    report = check(Linear(16, 16), torch.randn(2, 16, 16), backend="triton", removals=0)
    assert of(report, "one.weight").backend == "torch"


def test_frozen_and_unused_parameters_are_listed_with_the_reason() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)
            self.used.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.used(x))

    report = check(Model(), torch.randn(5, 4))
    assert report.passed, str(report)
    assert statuses(report) == {
        "used.weight": "PASS",
        "used.bias": "frozen",
        "spare.weight": "unused",
        "spare.bias": "unused",
    }
    assert "requires_grad is False" in of(report, "used.bias").reason
    assert "does not depend on it" in of(report, "spare.weight").reason
    assert "unused" in str(report) and "frozen" in str(report)
