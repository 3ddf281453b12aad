"""The examples as modules: they are scripts, so their folder has to be on the path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.opacus_randomness import use_randomness_of_opacus

EXAMPLES = Path(__file__).parents[2] / "examples"

# Three steps an epoch each.
TINY = {
    "digits": ["--epochs=2"],
    "language_model": [
        "--epochs=2",
        "--max-chunks=200",
        "--batch-size=60",
        "--width=16",
        "--layers=1",
    ],
}


@pytest.fixture(params=sorted(TINY))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def example(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """One example, run in a folder of its own, where it leaves its plot and checkpoint."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    return importlib.import_module(name)


@pytest.fixture
def randomness_of_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and noise are those that Opacus draws after the same ``torch.manual_seed``."""
    use_randomness_of_opacus(monkeypatch)


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The example that a test's module calls ``SCRIPT``, as ``python examples/...`` imports it."""
    name = request.module.SCRIPT
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module
