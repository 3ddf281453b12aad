"""``sharded``: the command as it is started, on two processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed as dist

from benchmarks.huggingface import transformer
from benchmarks.workload import Workload

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch without gloo"),
]


SIZE = ["--batch", "2", "--seq", "8"]
HERE = "tests.benchmarks.test_sharded"


def llama(batch: int, seq: int, checkpointing: bool = False) -> Workload:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"vocab_size": 64, **sizes, **heads, "tie_word_embeddings": True}
    shape = {"batch": batch, "seq": seq, "checkpointing": checkpointing}
    return transformer("", cls="LlamaForCausalLM", config=config, **shape)


@pytest.mark.parametrize(
    ("options", "first"),
    [
        (["--shards", "fsdp2", "--model", "decoder-small", "--layers", "1"], "all-gather"),
        (["--shards", "tp", "--model", "decoder-small", "--layers", "1"], "all-reduce"),
        (["--shards", "experts", "--model", "tiny-experts", "--layers", "1"], "all-to-all"),
        (["--model", "tiny", "--lora", "2", "--bucket", "64"], "all-gather"),
        (["--model", f"{HERE}:llama", "--checkpointing"], "reduce-scatter"),
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
    assert rows["flash"]["collectives"][first][0] >= 1
    assert all(row["peak_bytes"] > 0 for row in rows.values())
