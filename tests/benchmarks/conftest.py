"""How the tests here call the command line."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from benchmarks.__main__ import main

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def run() -> Run:
    """``run("step", "--model", "tiny")`` gives the exit status and what was printed."""

    def run(*arguments: object) -> tuple[int, str]:
        printed = io.StringIO()
        console = Console(file=printed, width=200)
        status = main([str(argument) for argument in arguments], console)
        return status, printed.getvalue()

    return run


@pytest.fixture(scope="session")
def quick() -> tuple[str, ...]:
    """Options that make a step run take about a second."""
    return ("--device", "cpu", "--model", "tiny", "--rounds", "2", "--steps", "1", "--warmup", "1")
