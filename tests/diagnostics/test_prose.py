"""Pages are in plain English, as far as a machine can tell. CONTRIBUTING.md has the style guide."""

from __future__ import annotations

import ast
import inspect
import io
import pkgutil
import re
import tokenize
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import ROOT

OF_THE_ROOT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
OTHERS = (*OF_THE_ROOT, "flash_clipping/troubleshooting.md")
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in OTHERS)]

LONGEST = 35

#: Words of this repository's dialect, with those of the field.
DIALECT = {
    r"served|serves": "supported",
    r"refused by name": "raises an error that names the module",
    r"looked at": "checked",
    r"anew": "again",
    r"by (?:itself|themselves)": "separately, or alone",
    r"said (?:once|loudly)": "warns once",
    r"mended": "fixed",
    r"(?<!not )found:": "leave history out",
}

#: Sentences name who acts first. Questions may begin with "What".
OPENINGS = r"(?:What|Whatever|Whoever|Of|Nor|The same)\b"


def _text(page: str) -> str:
    """The prose of a page: without code, comments, generated tables and targets of links."""
    for left_out in (
        r"<!-- [\w-]+:start -->.*?<!-- [\w-]+:end -->",
        r"<!--.*?-->",
        r"^ *```.*?^ *```",
        r"^\$\$$.*?^\$\$$",
    ):
        page = re.sub(left_out, "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"!\[[^]]*\]\([^)]*\)", "", page)
    page = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page)
    page = re.sub(r"``[^`]+``|`[^`]*`", "code", page)
    page = re.sub(r"\$[^$\n]+\$", "code", page)
    return re.sub(r"^( *)\* ", r"\1- ", page, flags=re.MULTILINE).replace("*", "")


def sentences(page: str) -> list[str]:
    """Sentences of paragraphs, items of lists and cells of tables; headings, with their signs."""
    parts: list[str] = []
    for line in _text(page).splitlines():
        line = line.rstrip()
        if re.match(r" *\|", line):
            parts += [cell for cell in line.split("|") if not re.fullmatch(r"[ :-]*", cell)] + [""]
        elif not line or re.match(r" *(?:[-+]|\d+\.) |#|>|\?\?\?|!!!", line):
            parts.append(re.sub(r"^ *(?:[-+]|\d+\.|>) ", "", line))
            if line.startswith("#"):
                parts.append("")
        elif parts:
            parts[-1] += f" {line.strip()}"
        else:
            parts.append(line)
    ends = r"(?<=[.!?])(?<!e\.g\.)(?<!et al\.) +(?=[A-Z`“\"(\[ε]|code)"
    return [
        sentence.strip() for part in parts for sentence in re.split(ends, part) if sentence.strip()
    ]


def faults(page: str) -> list[str]:
    found = []
    for sentence in sentences(page):
        words = re.findall(r"\w[\w'’.,/-]*", sentence)
        if len(words) > LONGEST:
            found.append(f"{len(words)} words: {sentence}")
        if re.match(OPENINGS, sentence) and not sentence.endswith("?"):
            found.append(f"begins with {sentence.split()[0]!r}: {sentence}")
        for word, instead in DIALECT.items():
            if re.search(rf"\b(?:{word})", sentence, flags=re.IGNORECASE):
                found.append(f"{word!r}, in place of which write {instead!r}: {sentence}")
    return found


API = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "api").glob("*.md"))]
NAMES = re.findall(r"^::: ([\w.]+)$", "\n".join(API), flags=re.MULTILINE)


def prose_of_docstring(text: str) -> str:
    """Markdown with each argument as a paragraph, and without types and examples."""
    text = re.sub(r"::\n\n(?: {4,}.*\n|\n)+", ".\n\n", f"{inspect.cleandoc(text)}\n")
    text = re.sub(r"^ +[\w*][\w*, ]*: ", "\n\n", text, flags=re.MULTILINE)
    return re.sub(r":\w+:(`[^`]+`)", r"\1", re.sub(r"^ +", "", text, flags=re.MULTILINE))


def docstrings(name: str) -> dict[str, str]:
    """Of an object of the reference, and of its public methods and properties."""
    found: Any = pkgutil.resolve_name(name)
    members = vars(found).items() if inspect.isclass(found) else ()
    texts = {name: found.__doc__}
    for key, member in members:
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if not key.startswith("_") and (inspect.isfunction(function)):
            texts[f"{name}.{key}"] = function.__doc__
    return {key: text for key, text in texts.items() if text}


def test_so_are_docstrings_of_the_reference() -> None:
    found = [
        f"{key}: {fault}"
        for name in NAMES
        for key, text in docstrings(name).items()
        for fault in faults(prose_of_docstring(text))
    ]
    assert not found, "\n".join(found)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_sentences_are_short_and_in_the_words_of_the_field(page: Path) -> None:
    found = faults(page.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        (" ".join(["word"] * 36) + ".", "36 words"),
        (f"* {' '.join(['word'] * 18)},\n  {' '.join(['word'] * 18)}.", "36 words"),
        ("| a | b |\n| - | - |\n| x | What is left out is rounding. |", "begins with 'What'"),
        ("It is so. Nor is that.", "begins with 'Nor'"),
        ("The same holds for noise.", "begins with 'The'"),
        ("Such layers are [served](there.md).", "supported"),
        ("Each sample is **by itself**.", "separately"),
        ("An error (found: nothing).", "history"),
        (f"* short\n* {' '.join(['word'] * 36)}\n* short", "36 words"),
    ],
)
def test_a_fault_is_found(page: str, fault: str) -> None:
    (found,) = faults(page)
    assert fault in found


@pytest.mark.parametrize(
    "page",
    [
        "**What is protected?** A row.",
        "```\nWhat is served anew\n```",
        "Set `served` to the value that [the page](served.md) has.",
        f"{' '.join(['Word'] * 20)}. {' '.join(['Word'] * 20)}.",
        f"* {' '.join(['word'] * 20)}\n* {' '.join(['word'] * 20)}",
        f"| {' '.join(['word'] * 20)} | {' '.join(['word'] * 20)} |",
        "## What is supported",
    ],
)
def test_plain_sentences_pass(page: str) -> None:
    assert faults(page) == []


def _comments_and_docstrings(source: str) -> list[str]:
    """Lines of a file that are no code."""
    lines, numbers = source.splitlines(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            numbers |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return [*comments, *(lines[number - 1] for number in sorted(numbers))]


def test_so_are_the_words_of_comments() -> None:
    files = sorted((ROOT / "flash_clipping").rglob("*.py"))
    lines = [x for file in files for x in _comments_and_docstrings(file.read_text("utf-8"))]
    text = "\n".join(lines)
    found = [
        f"{line.strip()}: write {instead!r}"
        for line in re.sub("``[^`\n]+``", "code", text).splitlines()
        for word, instead in DIALECT.items()
        if re.search(rf"\b(?:{word})", line, flags=re.IGNORECASE)
    ]
    assert not found, "\n".join(found)
