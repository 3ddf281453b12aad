"""The page of errors, troubleshooting.md beside this file: codes and what it says of each."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from flash_clipping.errors import InvalidValue

PAGE = Path(__file__).with_name("troubleshooting.md")


@dataclass(frozen=True)
class Entry:
    """What the page says of a code.

    Attributes:
        code: ``FC101``, say.
        message: of the error or warning, in short.
        heading: of the section, which other codes may share.
        text: of the section, as Markdown, without the list of its codes.
    """

    code: str
    message: str
    heading: str
    text: str

    def __str__(self) -> str:
        text = re.sub(r"\[([^]]+)\]\((?:\.\./)?([^)]+)\)", r"\1 (\2)", self.text)
        text = re.sub(r"```\w*\n(.*?)```\n", lambda c: indent(c[1], "    "), text, flags=re.DOTALL)
        return f"{self.code} {self.message}\n\n{self.heading}\n\n{text}"


def entries() -> list[Entry]:
    """Every entry of the page, in its order."""
    found = []
    for section in re.split("^##+ ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        codes = re.findall(r"^\* \*\*(FC\d{3})\*\* (.+)\n", body, re.MULTILINE)
        text = re.sub(r"^\* \*\*FC\d{3}.*\n", "", body, flags=re.MULTILINE).strip()
        found += [Entry(code, message, heading, text) for code, message in codes]
    return found


def entry(code: str) -> Entry:
    """The entry of a code; ``InvalidValue`` if there is none."""
    known = {each.code: each for each in entries()}
    if code.upper() not in known:
        close = " or ".join(difflib.get_close_matches(code.upper(), known))
        hint = f" Did you mean {close}?" if close else ""
        raise InvalidValue(f"FC301 code={code!r} is unknown; expected one as FC101.{hint}")
    return known[code.upper()]
