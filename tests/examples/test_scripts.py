"""Users' scripts run with their imports changed, and nothing else.

``scripts/`` holds whole scripts as they are written for Opacus, or for Trainer. Opacus runs each of
its own as well, on the same batches and noise, and must leave the same parameters and ε.
"""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.opacus_randomness import use_randomness_of_opacus

SCRIPTS = Path(__file__).with_name("scripts")

OPACUS = "from opacus import PrivacyEngine\n"
FLASH = "from flash_clipping import FlashPrivacyEngine as PrivacyEngine\n"
PRIVATE_TRAINER = """from functools import partial

from flash_clipping import PrivacyArguments
from flash_clipping.trainers.transformers import PrivateTrainer

privacy = PrivacyArguments(target_epsilon=8.0, target_delta=1e-5, accountant="rdp")
Trainer = partial(PrivateTrainer, privacy=privacy)
"""


def run(folder: Path, name: str, text: str) -> dict[str, Any]:
    """The names of a script that has run."""
    script = folder / f"{name}.py"
    script.write_text(text, encoding="utf-8")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "trainer")
)
def test_a_script_of_opacus_runs_with_the_import_changed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    use_randomness_of_opacus(monkeypatch)
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    expected = run(tmp_path, name, text)
    found = run(tmp_path, name, text.replace(OPACUS, FLASH))
    engine: Any = found["PrivacyEngine"]
    pairs = zip(found["model"].parameters(), expected["model"].parameters(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert engine.__name__ == "FlashPrivacyEngine" != expected["PrivacyEngine"].__name__
    assert found["epsilon"] == pytest.approx(expected["epsilon"], rel=1e-3) and found["epsilon"] > 0


def test_a_script_of_trainer_runs_with_the_import_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (SCRIPTS / "trainer.py").read_text(encoding="utf-8")
    assert type(run(tmp_path, "plain", text)["trainer"]).__name__ == "Trainer"
    lines = text.replace("    Trainer,\n", "").split("\n\nconfig = ", 1)
    found = run(tmp_path, "private", f"{lines[0]}\n{PRIVATE_TRAINER}\nconfig = {lines[1]}")
    assert 0 < found["trainer"].run.epsilon() <= 8.0
