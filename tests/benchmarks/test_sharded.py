"""``sharded``: the command as it is started, on two processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed as dist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch without gloo"),
]


SIZE = ["--batch", "2", "--seq", "8"]


@pytest.mark.parametrize(
    ("options", "first"),
    [
        (["--shards", "fsdp2", "--model", "decoder-small", "--layers", "1"], "_allgather_base_"),
        (["--shards", "tp", "--model", "decoder-small", "--layers", "1"], "all_reduce"),
        (["--shards", "experts", "--model", "tiny-experts", "--layers", "1"], "alltoall_base_"),
        (["--model", "tiny", "--lora", "2", "--bucket", "64"], "_allgather_base_"),
        (["--model", "tiny", "--checkpointing"], "reduce_scatter_tensor_coalesced_"),
    ],
)
def test_two_processes(options: list[str], first: str, tmp_path: Path) -> None:
    path = tmp_path / "sharded.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks", "sharded", *options, *SIZE, "--rounds", "2", "--steps", "1"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*command, "--json", str(path)], check=True, env=environment, timeout=120)
    rows = {row["method"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["flash"]["norm_error"] < 1e-5 and rows["flash"]["gradient_error"] < 1e-5
    assert len(rows["flash"]["milliseconds"]) == len(rows["nonprivate"]["milliseconds"]) == 2
    assert rows["flash"]["collectives"][first] >= 1
    assert all(row["peak_bytes"] > 0 for row in rows.values())
