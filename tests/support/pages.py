"""Code on the pages, as tests run it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def block(marker: str, page: str = "README.md") -> str:
    """The code after ``<!-- marker -->``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(rf"<!-- {re.escape(marker)} -->\n```\w+\n(.*?)```", text, re.DOTALL)
    assert found, f"{page} has no block marked {marker!r}"
    return found[1]


def sides(marker: str, page: str) -> tuple[str, str]:
    """The code before and after a diff, which adds five lines at most, and takes as many away."""
    lines = block(marker, page).splitlines()
    before, after = ([line for line in lines if line[:1] == sign] for sign in "-+")
    assert 0 < len(after) <= 5 and len(before) <= 5, f"{page}, {marker}: more than five lines"
    assert all(line[:1] in ("", " ", "-", "+") for line in lines)
    return (
        "\n".join(line[1:] for line in lines if line[:1] != "+"),
        "\n".join(line[1:] for line in lines if line[:1] != "-"),
    )
