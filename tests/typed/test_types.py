"""Type checkers see what ``make_private`` takes and returns, and mistakes in a user's script."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from flash_clipping import FlashPrivacyEngine, GradSampleHooksFlashClipping
from flash_clipping.engine.options import NoiseOptions, WrapperOptions

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_user_s_script_under_mypy_strict() -> None:
    """Unused ``type: ignore`` lines are errors: each of them is a mistake that is found."""
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--follow-imports=silent",
    ]
    command += ["--disable-error-code=import-untyped", "tests/typed/user_script.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_what_checkers_see_is_what_is_taken() -> None:
    taken = {*inspect.signature(FlashPrivacyEngine.make_private).parameters}
    seen = {*get_type_hints(NoiseOptions), "criterion", "grad_sample_mode", "wrap_model"}
    assert seen == taken - {"self", "kwargs"}
    wrapper = inspect.signature(GradSampleHooksFlashClipping.__init__).parameters
    assert {*get_type_hints(WrapperOptions)} == {*wrapper} - {"self", "m"}
