"""The package's names come at first use. Until then nothing that takes seconds is imported."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flash_clipping
from flash_clipping.__main__ import main
from flash_clipping.ops.runtime.backend import BACKENDS

LIBRARY = Path(flash_clipping.__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(LIBRARY.parent)}

#: What takes seconds to import, or follows from that.
SLOW = ("torch", "opacus", "numpy", "scipy", "triton", "cryptography")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def imported(log: str) -> set[str]:
    """Packages that ``-X importtime`` tells of."""
    return {name.partition(".")[0] for name in re.findall(r"^import time:.*\| +(\S+)$", log, re.M)}


@pytest.mark.parametrize(
    "arguments", ["--version", "--help", "check --help", "plan", "compse", "errors F"]
)
def test_the_command_answers_without_pytorch(arguments: str) -> None:
    ran = run("-X", "importtime", "-m", "flash_clipping", *arguments.split())
    assert ran.returncode == (0 if "--" in arguments else 2)
    found = imported(ran.stderr)
    assert found >= {"flash_clipping", "argparse"} and not found & {*SLOW}


def test_the_library_imports_nothing_that_may_not_be_needed() -> None:
    """Triton and the libraries whose layers it knows: these are there when such a model is."""
    uses = "import flash_clipping.ops; flash_clipping.FlashPrivacyEngine"
    ran = run("-X", "importtime", "-c", uses)
    found = imported(ran.stderr)
    assert not found & {"triton", "transformers", "peft", "lightning"}
    assert ran.returncode == 0 and found >= {"torch", "opacus", "numpy", "scipy"}, "not all is seen"


def test_a_terminal_hears_first_what_takes_seconds(tmp_path: Path) -> None:
    """``test_a_reader_that_has_enough_is_no_error``: what is no terminal hears nothing."""
    text = "from torch import nn, ones\n\ndef bad(): return nn.BatchNorm1d(3), ones(4, 3)\n"
    (tmp_path / "factories.py").write_text(text)
    reading, writing = pty.openpty()
    command = [sys.executable, "-m", "flash_clipping", "check", "factories:bad"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=writing, text=True
    ) as process:
        os.close(writing)
        said = os.read(reading, 1000)
        early = process.poll() is None
        assert process.stdout is not None and "BatchNorm1d" in process.stdout.read()
    os.close(reading)
    assert early and said.strip() == b"flash-clipping: loading PyTorch ..."
    assert process.returncode == 1


PROGRAM = """
import json, os, sys, traceback, types
import opacus, scipy.stats, torch.distributed.tensor  # which would take most of every use
import flash_clipping

def look(use):
    assert flash_clipping.__version__ and not hasattr(flash_clipping, "__wrapped__")
    assert "flash_clipping.public" not in sys.modules
    exec(use)
    if "flash_clipping.engine" in sys.modules:
        assert sys.modules["flash_clipping.engine.wings"].pipeline_group
        for rules in ("layers.mixture_of_experts", "hugging_face.experts"):
            assert f"flash_clipping.{rules}" in sys.modules
    names = flash_clipping.__all__
    assert all(getattr(flash_clipping, name) is vars(flash_clipping)[name] for name in names)
    assert {*names, "__version__", "layers"} <= {*dir(flash_clipping)}
    for folder in ("capture", "engine", "hugging_face", "layers", "pipelines", "rules"):
        assert isinstance(getattr(flash_clipping, folder), types.ModuleType)
    try:
        flash_clipping.FlashPrivacyEngin
    except AttributeError as error:
        assert str(error) == "module 'flash_clipping' has no attribute 'FlashPrivacyEngin'"
    else:
        raise AssertionError("found a name that nobody has")

for use in json.loads(sys.argv[1]):
    if not os.fork():
        try:
            look(use)
        except BaseException:
            print(use, traceback.format_exc(), sep="\\n", flush=True)
        os._exit(0)
    os.wait()
"""

USES = (
    "flash_clipping.FlashPrivacyEngine",
    "flash_clipping.__all__",
    "flash_clipping.layers.MixtureOfExperts",
    "flash_clipping.engine.privacy_engine",
    "dir(flash_clipping)",
    "from flash_clipping import FlashPrivacyEngine, samples",
    "from flash_clipping import *; FlashPrivacyEngine; register_rule",
    "from flash_clipping import pipelines",
    "from flash_clipping.pipelines.schedule import PrivateSchedule",
    "from flash_clipping.engine.optimizer import FlashDPOptimizer",
    "from flash_clipping.trainers import private_run",
    "import pickle; pickle.loads(b'cflash_clipping\\nFlashPrivacyEngine\\n.')",
    "import pickle; pickle.loads(b'cflash_clipping.engine.criterion\\nFlashLoss\\n.')",
)


def test_any_use_brings_all_names() -> None:
    """Also where a folder is imported first: it is met half-made by none. Where an engine is, there
    are the rules of all wings."""
    folders = [path.parent.relative_to(LIBRARY.parent) for path in LIBRARY.rglob("__init__.py")]
    uses = [*USES, *(f"import {'.'.join(folder.parts)}" for folder in sorted(folders))]
    assert len(uses) > 40
    ran = run("-c", PROGRAM, json.dumps(uses))
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stdout + ran.stderr


def test_an_interface_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``from``, which says of an ``AttributeError`` that the name is not there."""

    def fail(_: str) -> None:
        raise AttributeError("module 'opacus' has no attribute 'accountants'")

    monkeypatch.setattr(flash_clipping, "import_module", fail)
    monkeypatch.delitem(vars(flash_clipping), "MicroBatches", raising=False)
    with pytest.raises(ImportError, match="'opacus' has no attribute 'accountants'"):
        from flash_clipping import MicroBatches  # noqa: F401


def test_the_command_knows_all_backends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    assert f"--backend {{{','.join(BACKENDS)}}}" in capsys.readouterr().out
