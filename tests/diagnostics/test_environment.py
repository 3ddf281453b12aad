"""``flash-clipping env``."""

from __future__ import annotations

import json

import pytest
import torch

from flash_clipping.__main__ import main
from flash_clipping.diagnostics import environment
from flash_clipping.ops.runtime import backend as backends


def test_environment_report(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_CLIPPING_BACKEND", "torch")
    monkeypatch.setenv("SOME_TOKEN", "not to be printed")
    report = environment()
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["opacus"] and report["versions"]["flash-clipping"]
    assert {"dp-accounting", "peft", "trl", "diffusers", "torchao"} <= {*report["versions"]}
    assert report["variables"]["FLASH_CLIPPING_BACKEND"] == "torch"
    assert report["triton"]["available"] == backends.is_triton_available()
    assert report["triton"]["available"] or report["triton"]["why_not"]
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text and '"FLASH_CLIPPING_BACKEND": "torch"' in text
    assert "not to be printed" not in text
    assert json.loads(text)["versions"] == report["versions"]


def test_environment_says_why_there_is_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_import_error", lambda: "ImportError: no such thing")
    assert environment()["triton"] == {
        "available": False,
        "interpreting": backends.is_interpreting(),
        "why_not": "ImportError: no such thing",
    }
