"""What mkdocs.yml needs besides plugins: links out of docs/, formulas, reStructuredText in
docstrings, the version at the foot of every page.

Pages link to files of the repository by relative paths (``../CONTRIBUTING.md``), which work where
the repository itself is shown. The site gets a copy of every such file: Markdown and notebooks as
pages, anything else as it is. A link to a file that does not exist is an error.

Formulas become MathML, which browsers show without a script.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

#: Where the site holds files from outside of docs/.
FOLDER = "repository"

#: The page that an installed package holds, too, is one of the site's own.
ERRORS, ERRORS_URI = "flash_clipping/troubleshooting.md", "troubleshooting.md"

_LINK = re.compile(r"\]\((?!\w+:|#|/)([^)#\s]+)")
#: As pymdownx.arithmatex leaves them.
_FORMULA = re.compile(r"(class=\"arithmatex\">)\\([(\[])(.*?)\\[)\]](?=</)", flags=re.DOTALL)
_ROLE = re.compile(r":\w+:`(~?)([\w.]+)`")
_GROUPED = re.compile(
    r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+)(: .*(?:\n\1 +\S.*)*)$", flags=re.MULTILINE
)
_LITERAL = re.compile(r"^ *(\w*)::$", flags=re.MULTILINE)

#: What the reference has a heading for.
_NAMED = frozenset(
    name
    for page in (ROOT / "docs" / "api").glob("*.md")
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
)


def on_config(config: Any) -> Any:
    """Name the version."""
    module = (ROOT / "flash_clipping" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', module, flags=re.MULTILINE)
    config.copyright = f"Flash Clipping {version}"
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add every file outside of docs/ that a page links to."""
    pages = [file for file in files if file.is_documentation_page()]
    while pages:
        page = pages.pop()
        for target in _LINK.findall(page.content_string):
            path = _in_repository(target, page.src_uri)
            uri = _on_site(path)
            if path.startswith("docs/") or files.get_file_from_path(uri) is not None:
                continue
            if path.startswith("../") or not (ROOT / path).is_file():
                raise PluginError(f"{page.src_uri}: there is no file {path} to link to")
            content: bytes | str = (ROOT / path).read_bytes()
            if path.endswith(".ipynb"):
                content = _notebook(json.loads(content))
            copy = File.generated(config, uri, content=content)
            files.append(copy)
            if copy.is_documentation_page():
                pages.append(copy)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point links from docs/ to copies, and those of copies to where things are on the site."""
    uri = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        to = _on_site(_in_repository(match[1], uri))
        return f"]({posixpath.relpath(to, posixpath.dirname(uri) or '.')}"

    return _LINK.sub(moved, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Turn TeX into MathML."""
    return _FORMULA.sub(_mathml, content)


def _mathml(formula: re.Match[str]) -> str:
    display = "inline" if formula[2] == "(" else "block"
    return formula[1] + convert(html.unescape(formula[3]).strip(), display=display)


def _in_repository(target: str, uri: str) -> str:
    """The path in the repository that a link on the page ``uri`` of the site stands for."""
    copied = uri.startswith(f"{FOLDER}/")
    source = uri.removeprefix(f"{FOLDER}/") if copied else f"docs/{uri}"
    source = ERRORS if uri == ERRORS_URI else source
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _notebook(notebook: dict[str, Any]) -> str:
    """Cells as Markdown; what they printed is left out."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    parts = [f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells]
    return "\n\n".join(parts) + "\n"


def _on_site(path: str) -> str:
    if path == ERRORS:
        return ERRORS_URI
    path = re.sub(r"\.ipynb$", ".md", path)
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{FOLDER}/{path}"


class PlainDocstrings(griffe.Extension):
    """Docstrings hold a little reStructuredText; the site reads Markdown."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite one docstring: roles as links, where the reference has the name; parameters that
        share a line as rows of their own, each with its type and default."""
        if obj.docstring is None:
            return
        text = _LITERAL.sub(lambda match: match[1] and f"*{match[1]}*:", obj.docstring.value)
        text = _GROUPED.sub(_each, text)
        obj.docstring.value = _ROLE.sub(lambda role: _link(obj, bool(role[1]), role[2]), text)


def _each(group: re.Match[str]) -> str:
    return "\n".join(f"{group[1]}{name}{group[3]}" for name in group[2].split(", "))


def _link(obj: Any, is_short: bool, name: str) -> str:
    text = name.rpartition(".")[2] if is_short else name
    try:
        path = obj.resolve(name)
    except griffe.NameResolutionError:
        path = name
    return f"[`{text}`][{path}]" if path in _NAMED else f"`{text}`"
