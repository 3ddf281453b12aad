"""Tables on the pages that no command writes have the figures of their files."""

from __future__ import annotations

import json
import re
from statistics import median
from typing import Any

import pytest

from tests.support.pages import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the table with this first cell in its heading."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    (start,) = [n for n, line in enumerate(lines) if line.startswith(f"| {heading} |")]
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def results(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def medians(name: str) -> dict[tuple[str, str], float]:
    """Milliseconds by group and name."""
    found = results(name)["results"]
    return {(row["group"], row["name"]): median(row["milliseconds"]) for row in found}


def test_hyper_connections() -> None:
    took = medians("h100-hyper-connections.json")
    table = rows("hyper-connections.md", "D")
    assert len(table) == 3
    for width, eager, step, private in table:
        group = f"B 4, S 4096, n 4, D {width}"
        assert eager == f"{took[group, 'eager step']:.1f} ms"
        assert step == f"{took[group, 'step']:.2f} ms"
        assert private == f"{took[group, 'private step'] / took[group, 'step']:.2f}×"


def test_product_keys() -> None:
    took = medians("h100-product-key.json")
    table = rows("product-key-router.md", "entries of an axis, k")
    assert len(table) == 6
    for sizes, topk, kernels, ratio in table:
        entries, k = sizes.split(", ")
        group = f"s {entries}, k {k}"
        theirs = took[group, "topk forward"] + took[group, "topk backward"]
        ours = took[group, "forward"] + took[group, "backward"]
        assert [topk, kernels] == [f"{1000 * theirs:.0f}", f"{1000 * ours:.0f}"]
        assert ratio == f"{theirs / ours:.1f}×"


#: Files of the rows of the table on several GPUs, in their order; "flash" if there is no method.
SHARDED = [
    "h100-fsdp2-t1024",
    "h100-fsdp2-t2048",
    "h100-hsdp",
    "h100-fsdp2-compiled",
    "h100-fsdp2-lora",
    "h100-fsdp2-checkpointing",
    "h100-fsdp2-llama-3.2-1b",
    "h100-fsdp2-llama-3.2-3b",
    "h100-tp",
    "h100-experts",
    "h200-fsdp2-llama-3.2-1b-checkpointing",
    "h200-fsdp2-llama-3.2-1b-checkpointing:flash-two-pass",
    "h200-fsdp2-decoder-5b-checkpointing:flash-two-pass",
]


@pytest.mark.parametrize(("place", "file"), list(enumerate(SHARDED)), ids=SHARDED)
def test_several_gpus(place: int, file: str) -> None:
    name, _, method = file.partition(":")
    found = {row["method"]: row for row in results(f"sharded/{name}.json")["rows"]}
    plain, private = found["nonprivate"], found[method or "flash"]
    table = rows("scale.md", "what")
    assert len(table) == len(SHARDED)
    shown = [median(row["milliseconds"]) for row in (plain, private)]
    shown += [row["host_ms"] for row in (plain, private)]
    ratios = [private["ratio"], private["memory_ratio"]]
    assert table[place][1:] == [f"{x:.0f}" for x in shown] + [f"{x:.2f}" for x in ratios]


def test_codes_on_the_pages_are_those_of_the_page_of_errors() -> None:
    known = (ROOT / "flash_clipping" / "troubleshooting.md").read_text(encoding="utf-8")
    codes = set(re.findall(r"^\* \*\*(FC\d{3})\*\*", known, flags=re.MULTILINE))
    assert len(codes) > 200
    for page in sorted((ROOT / "docs").rglob("*.md")):
        used = set(re.findall(r"\bFC\d{3}\b", page.read_text(encoding="utf-8")))
        assert used <= codes, f"{page.name}: {used - codes}"
