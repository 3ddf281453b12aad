"""``python -m tests.support.forking FOLDER``: run the groups of processes that its input lists, by
lanes. Each group's folder then has a neighbour that says how it ended."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback
from pathlib import Path

from tests.support.starting import Group


def fill(groups: list[Group], folder: Path) -> None:
    """One after the other."""
    for group in groups:
        at = folder / group.name
        try:
            group.fill(at)
            at.with_suffix(".done").touch()
        except BaseException:
            at.with_suffix(".failed").write_text(traceback.format_exc())


def main() -> None:
    given = sys.stdin.buffer.read()
    importlib.import_module("tests.distributed.imported")
    lanes: list[list[Group]] = pickle.loads(given)
    folder, children = Path(sys.argv[1]), []
    for groups in lanes[1:]:
        if not hasattr(os, "fork"):
            fill(groups, folder)
        elif (child := os.fork()) == 0:
            fill(groups, folder)
            os._exit(0)
        else:
            children.append(child)
    fill(lanes[0], folder)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
