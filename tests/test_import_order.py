"""Folders of the library import downward only; modules, also of benchmarks, never in a circle."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import flash_clipping

LIBRARY = Path(flash_clipping.__file__).parent

#: Wings beside the core: they import it and are never imported by it. Only the package itself
#: (``public.py``, which the engine imports without reading it), its command line and other wings
#: may name them.
WINGS = {
    f"flash_clipping.{name}"
    for name in ("graphs", "hugging_face", "layers", "noise", "one_by_one", "pipelines", "trainers")
}

#: From top to bottom. Folders on one floor do not import each other, but for the top.
FLOORS = [
    {f"flash_clipping{name}" for name in ("", ".__main__", ".diagnostics", ".public")},
    {"flash_clipping.trainers", "flash_clipping.auditing", "flash_clipping.planning"},
    {
        f"flash_clipping.{name}"
        for name in ("graphs", "hugging_face", "noise", "one_by_one", "pipelines")
    },
    {"flash_clipping.layers"},
    {"flash_clipping.engine"},
    {"flash_clipping.distributed"},
    {"flash_clipping.capture"},
    {"flash_clipping.rules", "flash_clipping.finish"},
    {"flash_clipping.factors"},
    {"flash_clipping.ops"},
    {"flash_clipping.ops.runtime", "flash_clipping.randomness"},
    {"flash_clipping._compat", "flash_clipping.codes"},
    {"flash_clipping.errors"},
]
LEVELS = {name: level for level, names in enumerate(FLOORS) for name in names}

#: Hands on what is below, and is read by what stands at the top.
PUBLIC = "flash_clipping"


def name_of(path: Path) -> str:
    parts = path.relative_to(LIBRARY.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FOLDERS = (LIBRARY, LIBRARY.parent / "benchmarks")
FILES = {name_of(path): path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))}


def imports_of(module: str) -> set[str]:
    """Modules of its own package that a module imports, wherever in its text it does."""
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.add(name if name in FILES else base)
    own = module.split(".")[0]
    return {name for name in found if name.split(".")[0] == own and name != module}


EVERY = {module: imports_of(module) for module in FILES}
IMPORTS = {module: found for module, found in EVERY.items() if module.split(".")[0] == PUBLIC}


def place_of(module: str) -> str:
    """The folder, or the module beside the folders, that has a floor: a new one needs one."""
    parts = module.split(".")
    return next(
        name
        for length in range(len(parts), 0, -1)
        if (name := ".".join(parts[:length])) in LEVELS and (length > 1 or len(parts) == 1)
    )


def test_imports_go_downward() -> None:
    upward = []
    for module, names in IMPORTS.items():
        here = place_of(module)
        upward += [
            f"{module} imports {name}, which is not below {here}"
            for name in sorted(names)
            if (there := place_of(name)) != here
            and (LEVELS[there] < LEVELS[here] or LEVELS[there] == LEVELS[here] > 0)
        ]
    assert upward == []


def test_the_core_imports_no_wing() -> None:
    core = [name for name in IMPORTS if place_of(name) not in WINGS and LEVELS[place_of(name)]]
    wings = {name: [one for one in IMPORTS[name] if place_of(one) in WINGS] for name in core}
    assert not any(wings.values()), {name: found for name, found in wings.items() if found}


def test_every_import_is_of_a_module_that_exists() -> None:
    """So that none goes unseen."""
    named = {name for names in EVERY.values() for name in names}
    assert named <= set(FILES), sorted(named - set(FILES))


def test_no_module_is_in_a_circle() -> None:
    # Whoever reads the package's own names stands at the top, as the test above has it.
    TopologicalSorter({module: names - {PUBLIC} for module, names in EVERY.items()}).prepare()
