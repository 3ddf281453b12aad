"""What is published: a source distribution that is the repository, and a wheel of the package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

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


def test_the_wheel_is_the_package_alone(sdist: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build("wheel", sdist, tmp_path)) as wheel:
        names = wheel.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = wheel.read(metadata).decode()
    of_package = {name for name in tracked() if name.startswith("flash_clipping/")}
    assert {name for name in names if ".dist-info/" not in name} == of_package
    assert "flash_clipping/py.typed" in names
    message = message_from_string(text)
    assert message["Description-Content-Type"] == "text/markdown"
    page = str(message.get_payload())
    assert "Migrating from Opacus (`docs/migrating-from-opacus.md`)" in page
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links and all(link.startswith("https://") for link in links)
