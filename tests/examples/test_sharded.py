"""The language model in shards, as `torchrun` starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed as dist

from tests.examples.conftest import EXAMPLES, TINY

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch without gloo")


def run(folder: Path, processes: int, how: str, *more: str) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = str(EXAMPLES / "language_model.py")
    arguments = [*TINY["language_model"], "--device=cpu", f"--shard={how}", *more]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*torchrun, f"--nproc-per-node={processes}", script, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fsdp2", "tp"])
def test_a_run_of_two_processes_goes_on_in_one(how: str, tmp_path: Path) -> None:
    first = run(tmp_path, 2, how, "--max-steps=2")
    assert first.count("Stopped after step 2 of 6") == 1  # one process prints
    assert "6 of 6" in run(tmp_path, 1, how, "--resume")


def test_tensor_parallelism_needs_as_many_heads_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import language_model
    import sharding

    monkeypatch.setattr(sharding, "start", lambda device: None)
    monkeypatch.setattr(language_model.dist, "get_world_size", lambda: 3)
    with pytest.raises(SystemExit):
        language_model.main(["--device=cpu", "--shard=tp"])
    assert "4 heads cannot be shared by 3 processes" in capsys.readouterr().err


def test_without_torchrun_it_says_how_to_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    import language_model

    with pytest.raises(SystemExit, match="torchrun"):
        language_model.main(["--device=cpu", "--shard=fsdp2"])
