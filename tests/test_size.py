"""The library's lines, room by room, stay under caps that only fall."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import flash_clipping

LIBRARY = Path(flash_clipping.__file__).parent
CAPS = Path(__file__).parent / "line_caps.json"

#: How far below its cap a room may be before the cap has to follow.
SLACK = 40


def lines_by_room() -> Counter[str]:
    """Lines of every folder of the library, and of the files beside the folders together."""
    lines: Counter[str] = Counter()
    for path in LIBRARY.rglob("*.py"):
        parts = path.relative_to(LIBRARY).parts
        room = parts[0] if len(parts) > 1 else "beside the folders"
        lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def test_every_room_is_under_its_cap(capsys: pytest.CaptureFixture[str]) -> None:
    caps: dict[str, int] = json.loads(CAPS.read_text(encoding="utf-8"))
    lines = lines_by_room()
    rows = [
        f"{room:20} {lines[room]:6} of {cap:6} ({lines[room] - cap:+})"
        for room, cap in caps.items()
    ]
    total = f"{'in all':20} {lines.total():6} of {sum(caps.values()):6}"
    with capsys.disabled():
        print("", *rows, total, sep="\n")
    assert lines.keys() == caps.keys(), "a room came or went: tests/line_caps.json"
    over = {room: lines[room] - cap for room, cap in caps.items() if lines[room] > cap}
    assert not over, f"lines over the cap: {over}. Take away as much as you add."
    below = {room: lines[room] for room, cap in caps.items() if lines[room] < cap - SLACK}
    assert not below, f"caps follow what was taken away, in tests/line_caps.json: {below}"


def test_caps_fall() -> None:
    """Lines may move from room to room; together they do not become more."""
    shown = subprocess.run(
        ["git", "show", "HEAD^:tests/line_caps.json"], cwd=CAPS.parent, capture_output=True
    )
    if shown.returncode:
        pytest.skip("no commit before this one has caps")
    before, now = json.loads(shown.stdout), json.loads(CAPS.read_text(encoding="utf-8"))
    assert sum(now.values()) <= sum(before.values())
