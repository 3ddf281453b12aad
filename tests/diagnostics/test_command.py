"""``flash-clipping check`` as a command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flash_clipping
from flash_clipping.__main__ import main

FACTORIES = """
import threading

import torch
from torch import nn


def good():
    torch.manual_seed(0)
    print("no part of any report")
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(5, 4)


def with_loss():
    model, x = good()
    y = torch.tensor([0, 1, 2, 0, 1])
    loss = nn.CrossEntropyLoss()
    return model, (x, y), lambda model, batch: loss(model(batch[0]), batch[1])


def bad():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), torch.randn(5, 4)


class Times(nn.Module):
    def forward(self, x):
        return x * len(x)


def times_the_batch():
    model, x = good()
    return model.append(Times()), x


def bags():
    from tests.zoo.rows import CASES
    return CASES["2 bags end to end"].make(torch.float32)


def buffers():
    model, x = good()
    model[0].register_buffer("calls", torch.zeros(()))
    model[0].register_forward_pre_hook(lambda layer, _: layer.calls.add_(1) and None)
    return model, x


def not_a_pair():
    return good()[0]


def four():
    return (*good(), None, None)


def swapped():
    model, x = good()
    return x, model


def frozen():
    model, x = good()
    return model.requires_grad_(False), x


def wrapped():
    from flash_clipping import GradSampleModuleFlashClipping
    model, x = good()
    return GradSampleModuleFlashClipping(model), x


def no_loss():
    return (*good(), "cross entropy")


def needs(path, size=3):
    return good()


def fails():
    return good(), undefined_name


def locked():
    model, x = good()
    model.lock = threading.Lock()
    return model, x


def no_tensor():
    return good()[0], "a batch"


model = good()[0]
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_factories.py").write_text(FACTORIES)
    (tmp_path / "own_broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_factories"
    sys.modules.pop("own_factories", None)


def test_command_passes_and_prints_a_table(factories: str, capsys) -> None:
    assert main(["check", f"{factories}:good"]) == 0
    out = capsys.readouterr().out
    assert "0 (Linear)" in out and "LinearRule" in out
    assert out.rstrip().endswith("PASS")
    assert (
        main(["check", f"{factories}:with_loss", "--dtype", "float64", "--mode", "two_pass"]) == 0
    )


def test_command_fails_with_status_one(factories: str, capsys) -> None:
    assert main(["check", f"{factories}:bad"]) == 1
    out = capsys.readouterr().out
    assert "1 (BatchNorm1d)" in out and out.rstrip().endswith("FAILED")
    # A tolerance that no rounding can meet.
    assert main(["check", f"{factories}:good", "--tolerance", "1e-30"]) == 1


def test_command_hands_options_to_the_wrapper(factories: str, capsys) -> None:
    assert main(["check", f"{factories}:bags"]) == 0
    assert main(["check", f"{factories}:bags", "--folded", "ba*"]) == 0
    assert main(["check", f"{factories}:buffers"]) == 1
    assert "its buffer 'calls' is changed by forward" in capsys.readouterr().out
    assert main(["check", f"{factories}:buffers", "--no-strict"]) == 0


def test_command_prints_json(factories: str, capsys) -> None:
    assert main(["check", f"{factories}:with_loss", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True and report["batch_size"] == 5
    assert [p["name"] for p in report["parameters"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert report["parameters"][0]["rule"] == "LinearRule"
    assert len(report["parameters"][0]["norms"]) == 5
    assert main(["check", f"{factories}:bad", "--json"]) == 1
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=pytest.fail)["norm_error"] == "nan"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_factories", "expected MODULE:FACTORY"),
        ("own_factories.good", "expected MODULE:FACTORY"),
        ("no_such_module_here:good", "cannot import 'no_such_module_here'"),
        ("own_broken:good", r"a_module_that_is_not_there.*line 1 of .*own_broken\.py"),
        ("own_factories:goood", "Did you mean good"),
        ("own_factories:model", r"model\(\) failed: TypeError"),
        ("own_factories:not_a_pair", "returned a Sequential; expected the tuple"),
        ("own_factories:four", "returned a tuple of 4"),
        ("own_factories:swapped", "returned a Tensor as model"),
        ("own_factories:frozen", "without a trainable parameter"),
        ("own_factories:wrapped", "as it is before make_private"),
        ("own_factories:no_loss", "returned a str as loss"),
        ("own_factories:needs", "missing 1 required positional argument: 'path'"),
        ("own_factories:fails", r"NameError.*undefined_name.*line \d+ of .*own_factories\.py"),
        ("own_factories:locked", "FC923 check\\(\\) cannot copy the model: cannot pickle"),
        ("own_factories:no_tensor", "holds no tensor with a batch axis"),
    ],
)
def test_bad_factories_are_explained_with_status_two(
    factories: str, name: str, message: str, capsys
) -> None:
    assert main(["check", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and re.search(message, captured.err), captured.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"flash-clipping {flash_clipping.__version__}\n"


@pytest.mark.parametrize("arguments", ["--help", pytest.param("env", marks=pytest.mark.slow)])
def test_a_reader_that_has_enough_is_no_error(arguments: str) -> None:
    """``flash-clipping env | head -1``, where nobody reads any more before the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(
        [sys.executable, "-m", "flash_clipping", *arguments.split()],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert run.stderr == "" and run.returncode in (0, 128 + 13)


def test_who_interrupts_a_command_sees_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flash_clipping.__main__._json", interrupt)
    assert main(["compose", "run.json"]) == 128 + 2


FILES = {
    "list.json": "[1, 2]",
    "text.json": "no JSON",
    "format.json": '{"format": 1}',
    "release.json": json.dumps(
        {"format": 1, "delta": 1e-5, "relation": "r", "unit": "u", "assumptions": []}
        | {"violated": [], "seeds": [], "parts": [], "releases": [{"noise_multiplier": -1}]}
    ),
    "nothing.json": '{"scores": null, "included": [true], "epsilon": 3, "delta": 1e-5}',
    "object.json": '{"scores": {}, "included": [true], "epsilon": 3, "delta": 1e-5}',
    "scores.json": '{"scores": "x", "included": [true], "epsilon": 3, "delta": 1e-5}',
}
PLAN = "plan --samples 100 --batch-size 10 --accountant rdp"


@pytest.mark.parametrize(
    "arguments",
    [
        *("compose list.json", "compose text.json", "compose format.json", "compose nowhere.json"),
        *("compose release.json", "compose release.json --delta nan", "compose ."),
        *("audit list.json --guesses 1", "audit scores.json --guesses 1", "audit . --guesses 1"),
        *("audit nothing.json --guesses 1", "audit object.json --guesses 1"),
        *("bench own_factories:good --steps 0", "errors FC999"),
        *("check own_factories:good --device nonsense", "check own_factories:good --device meta"),
        "check own_factories:good --max-grad-norm -1",
        "check own_factories:good --tolerance nan",
        "check own_factories:good --removals -3",
        "check own_factories:good --folded nothing",
        f"check own_factories:good --seed {2**80}",
        *(f"{PLAN} --epochs 1", f"{PLAN} --epsilon 1", f"{PLAN} --epochs -1 --epsilon 1"),
        f"{PLAN} --epochs 1 --noise-multiplier 1 --plot nowhere/plan.png",
    ],
)
def test_what_cannot_be_used_has_status_two(
    factories: str, tmp_path: Path, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    try:
        status = main(arguments.split())
    except SystemExit as error:  # of argparse
        status = error.code
    assert status == 2
    error = capsys.readouterr().err
    assert f"flash-clipping {arguments.split()[0]}: " in error and "Traceback" not in error


def test_commands_say_what_they_do(factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{factories}:good", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["passed"] and "no part of any report" in said.err
    assert re.findall("loading|plain model|flash clipping|oracle|removed", said.err) == [
        *("loading", "plain model", "flash clipping", "oracle", "removed")
    ]
    assert main([*PLAN.split(), "--epochs", "1", "--epsilon", "3"]) == 0
    assert capsys.readouterr().err.count(" ...\n") == 2
    assert main([*PLAN.split(), "--epochs", "1", "--epsilon", "3", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
