"""What is published: a source distribution that is the repository, and a wheel of the package."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from flash_clipping import __version__

ROOT = Path(__file__).parents[1]


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode or not listed.stdout:
        pytest.skip("not in a clone")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def build(what: str, source: Path, output: Path) -> Path:
    code = f"from setuptools.build_meta import build_{what}; build_{what}({str(output)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (built,) = output.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of the tracked files alone, and unpacked."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("distribution")
    for name in tracked():
        (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "clone" / name)
    (folder / "built").mkdir()
    with tarfile.open(build("sdist", folder / "clone", folder / "built")) as packed:
        packed.extractall(folder, filter="data")
    (unpacked,) = folder.glob("flash_clipping-*")
    return unpacked


def test_the_source_distribution_is_whole(sdist: Path) -> None:
    missing = [name for name in tracked() if not (sdist / name).is_file()]
    assert missing == []


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of the unpacked source distribution."""
    return build("wheel", sdist, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_is_the_package_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = packed.read(metadata).decode()
    of_package = {name for name in tracked() if name.startswith("flash_clipping/")}
    assert {name for name in names if ".dist-info/" not in name} == of_package
    assert "flash_clipping/py.typed" in names
    message = message_from_string(text)
    assert message["Version"] == __version__
    assert message["License-Expression"] == "Apache-2.0"
    assert message["Description-Content-Type"] == "text/markdown"
    page = str(message.get_payload())
    assert "Migrating from Opacus (`docs/migrating-from-opacus.md`)" in page
    assert "![" not in page
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links and all(link.startswith("https://") for link in links)


def test_the_wheel_runs_where_there_is_no_clone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "installed")
    code = "import flash_clipping.__main__ as command; print(command.__file__); command.main()"
    shown = {
        "--version": f"flash-clipping {__version__}\n",
        "errors FC101": "FC101 the layer mixes",
    }
    for arguments, begins in shown.items():
        ran = subprocess.run(
            [sys.executable, "-c", code, *arguments.split()],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
            capture_output=True,
            text=True,
        )
        file, _, said = ran.stdout.partition("\n")
        assert Path(file).is_relative_to(tmp_path), ran.stderr
        assert said.startswith(begins)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("docs/index.md", "Version {} "),
        ("docs/citing.md", "version = {{{}}}"),
        ("CITATION.cff", "version: {}\n"),
    ],
)
def test_pages_name_the_version(page: str, words: str) -> None:
    assert words.format(__version__) in (ROOT / page).read_text(encoding="utf-8")


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    needed, of_extras = (
        [re.split(r"[^\w-]", line)[0] for line in lines]
        for lines in (project["dependencies"], extras)
    )
    imported = set()
    for path in (ROOT / "flash_clipping").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    others = imported - sys.stdlib_module_names - {"flash_clipping"}
    assert others >= {"numpy", "scipy", "torch"}
    assert others <= {name.replace("-", "_") for name in (*needed, *of_extras)}
    assert {"numpy", "scipy"} <= {*needed}
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
    for name in {*needed, *of_extras} - {"flash-clipping"}:
        assert re.search(rf"^{name}==", pinned, re.MULTILINE), name
