"""Run ``python -m tests.mutants`` before and after tests are cut: what is left must kill as many.

A mutant is the library with one line changed (``mutants.txt``). Each is tried in a copy of the
repository, with a few tests; a test that fails has killed it. Mutants are found by their text, so
that code may move; one whose text has gone, or stands twice, is an error: write it anew.

    python -m tests.mutants                      # all of them, two at a time
    python -m tests.mutants "draws repeat" ...   # these
"""

from __future__ import annotations

import argparse
import compileall
import multiprocessing
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "flash_clipping"


@dataclass(frozen=True)
class Mutant:
    """What stands in the library, what takes its place, and the tests that must fail then."""

    name: str
    old: str
    new: str
    tests: tuple[str, ...]

    def file(self, root: Path) -> Path:
        """Where it is found in a copy of the repository.

        Raises:
            ValueError: nowhere, or in several places.
        """
        found = {path: path.read_text().count(self.old) for path in root.glob(f"{PACKAGE}/**/*.py")}
        if sum(found.values()) != 1:
            raise ValueError(f"{self.name}: found {sum(found.values())} times: {self.old}")
        return max(found, key=lambda path: found[path])


def mutants() -> list[Mutant]:
    """Those of ``mutants.txt``."""
    text = Path(__file__).with_name("mutants.txt").read_text()
    entries = re.findall(r"^([^#\n].*)\n- (.*)\n\+ (.*)\n\? (.*)$", text, re.MULTILINE)
    found = []
    for name, old, new, arguments in entries:
        words = shlex.split(arguments)
        tests = tuple(f"tests/{word}" if word.endswith(".py") else word for word in words)
        found.append(Mutant(name, old, new, tests))
    if len(found) != len(re.findall(r"^\? ", text, re.MULTILINE)):
        raise ValueError("mutants.txt: an entry does not have four lines")
    return found


def copy_repository(folder: Path) -> None:
    """All that is tracked, as it is now, compiled beforehand."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    compileall.compile_dir(folder / PACKAGE, quiet=2)


def import_dependencies() -> None:
    """Everything that takes long to import, so that processes that are forked have it."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import opacus
    import pytest
    import torch
    import torch._dynamo

    assert opacus and pytest and torch._dynamo
    torch.set_num_threads(1)


def _run_tests(folder: str, tests: tuple[str, ...], output: str) -> None:
    """In a process of its own."""
    import pytest

    os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
    os.dup2(1, 2)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = sys.path[0] = folder
    sys.dont_write_bytecode = True  # of a mutant
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", PACKAGE)]:
        del sys.modules[name]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=200"]
    code = pytest.main([*options, *tests])
    sys.stdout.flush()
    os._exit(int(code))


def try_one(mutant: Mutant | None, folder: Path, tests: tuple[str, ...]) -> tuple[bool, str]:
    """Whether tests fail in this copy, and the first that does."""
    changed = None if mutant is None else mutant.file(folder)
    if mutant is not None and changed is not None:
        before = changed.stat()
        original = changed.read_text()
        changed.write_text(original.replace(mutant.old, mutant.new))
    output = folder / "output"
    arguments = str(folder), tests, str(output)
    process = multiprocessing.get_context("fork").Process(target=_run_tests, args=arguments)
    try:
        process.start()
        process.join()
    finally:
        if changed is not None:
            changed.write_text(original)
            os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    text = output.read_text()
    if process.exitcode not in (0, 1):
        raise RuntimeError(f"{mutant}: pytest ended with {process.exitcode}:\n{text[-3000:]}")
    first = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", text, re.MULTILINE)
    return process.exitcode == 1, first[1] if first else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants; all of them by default")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--whole", action="store_true", help="run their tests without mutants too")
    options = parser.parse_args(arguments)
    known = mutants()
    if unknown := set(options.names) - {mutant.name for mutant in known}:
        parser.error(f"no such mutant: {', '.join(unknown)}")
    chosen = [mutant for mutant in known if mutant.name in options.names or not options.names]
    for mutant in chosen:
        mutant.file(ROOT)
    work: queue.SimpleQueue[tuple[Mutant | None, tuple[str, ...]]] = queue.SimpleQueue()
    if options.whole:
        for tests in dict.fromkeys(mutant.tests for mutant in chosen):
            work.put((None, tests))
    for mutant in chosen:
        work.put((mutant, mutant.tests))
    import_dependencies()
    wrong: list[str] = []

    def run(folder: Path) -> None:
        copy_repository(folder)
        while not work.empty():
            mutant, tests = work.get_nowait()
            began = time.monotonic()
            try:
                killed, by = try_one(mutant, folder, tests)
            except (RuntimeError, ValueError) as error:
                killed, by = mutant is None, str(error)
            if killed == (mutant is None):
                wrong.append(" ".join(tests) if mutant is None else mutant.name)
            says = ("passes", "FAILS") if mutant is None else ("SURVIVES", "killed")
            name = " ".join(tests) if mutant is None else mutant.name
            seconds = time.monotonic() - began
            print(f"{says[killed]:9}{seconds:5.0f} s  {name}  {by}", flush=True)

    with tempfile.TemporaryDirectory(prefix="mutants") as temporary:
        threads = []
        for job in range(options.jobs):
            threads.append(threading.Thread(target=run, args=(Path(temporary, str(job)),)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    print(f"{len(chosen)} mutants, {len(wrong)} not as expected: {', '.join(wrong) or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
