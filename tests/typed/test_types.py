"""What type checkers see of ``make_private`` is what it takes; all that pages list has a type."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import griffe

from flash_clipping import FlashPrivacyEngine, GradSampleHooksFlashClipping
from flash_clipping.engine.options import NoiseOptions, WrapperOptions

ROOT = Path(__file__).parents[2]


def test_what_checkers_see_is_what_is_taken() -> None:
    taken = {*inspect.signature(FlashPrivacyEngine.make_private).parameters}
    seen = {*get_type_hints(NoiseOptions), "criterion", "grad_sample_mode", "wrap_model"}
    assert seen == taken - {"self", "kwargs"}
    wrapper = inspect.signature(GradSampleHooksFlashClipping.__init__).parameters
    assert {*get_type_hints(WrapperOptions)} == {*wrapper} - {"self", "m"}


def rows_of(thing: Any) -> Iterator[Any]:
    """Parameters and attributes in the docstrings of an object and of its public members."""
    members = thing.all_members.items() if thing.is_class else ()
    for one in (thing, *(member for name, member in members if not name.startswith("_"))):
        for section in one.docstring.parsed if one.docstring else ():
            if section.kind.value in ("parameters", "other parameters", "attributes"):
                yield from section.value


def test_every_row_of_the_reference_has_a_type() -> None:
    pages = [path.read_text(encoding="utf-8") for path in ROOT.glob("docs/api/*.md")]
    extension = runpy.run_path(str(ROOT / ".ci" / "pages.py"))["PlainDocstrings"]
    package = griffe.load(
        "flash_clipping",
        search_paths=[ROOT],
        extensions=griffe.load_extensions(extension),
        docstring_parser="google",
        docstring_options={"warn_missing_types": False},
    )
    names = re.findall(r"^::: flash_clipping\.([\w.]+)$", "\n".join(pages), flags=re.MULTILINE)
    rows = {name: [*rows_of(package[name])] for name in names}
    assert sum(map(len, rows.values())) > 200
    without = {name: [row.name for row in of if not row.annotation] for name, of in rows.items()}
    assert not any(without.values()), {name: of for name, of in without.items() if of}


def is_compiled(function: ast.FunctionDef) -> bool:
    """Whether Triton or Gluon compiles it."""
    return any(re.search("jit|constexpr", ast.unparse(one)) for one in function.decorator_list)


def test_functions_of_the_host_beside_kernels_are_typed() -> None:
    """Mypy lets all functions of these modules be without types."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert options["strict"]
    (free,) = (one for one in options["overrides"] if "disallow_untyped_defs" in one)
    for module in free["module"]:
        path = ROOT / f"{module.replace('.', '/')}.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not is_compiled(node):
                args = ast.walk(node.args)
                without = [arg for arg in args if isinstance(arg, ast.arg) and not arg.annotation]
                assert all(arg.arg == "self" for arg in without), f"{path}: {node.name}"
                assert node.returns is not None or node.name == "__init__", node.name
