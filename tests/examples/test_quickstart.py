"""The notebook runs as it is, and learns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Optimal order is")
def test_the_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict[str, object] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), names)
    out = capsys.readouterr().out
    epochs = re.findall(r"([\d.]+)% of held-out digits, epsilon ([\d.]+)", out)
    assert len(epochs) == 15
    assert float(epochs[-1][0]) > 80 and 2.5 < float(epochs[-1][1]) <= 3.0
    assert "add or remove one sample" in out and out.rstrip().endswith("PASS")
