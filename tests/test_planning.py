"""Plans of runs: against the engine, by hand, and as a command."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine, GradSampleModuleFlashClipping
from flash_clipping.__main__ import main
from flash_clipping.planning import plan
from tests.support.errors import raises
from tests.support.pages import block


def test_a_plan_is_what_the_engine_says() -> None:
    """The noise that ``make_private_with_epsilon`` draws for this ε, and the ε that it reports."""
    model = nn.Linear(2, 2)
    engine = FlashPrivacyEngine(accountant="rdp")
    made: tuple[Any, ...] = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(230, 2)), batch_size=50),
        target_epsilon=3.0,
        target_delta=1e-4,
        epochs=2,
        max_grad_norm=1.0,
    )
    _, optimizer, loader = made
    found = plan(230, 50, epochs=2, epsilon=3.0, delta=1e-4, accountant="rdp")
    assert found.noise_multiplier == optimizer.noise_multiplier
    assert found.sample_rate == loader.sample_rate == 1 / 5
    assert (found.steps, found.steps_per_epoch, found.epochs) == (10, 5, 2.0)
    engine.accountant.history = [(found.noise_multiplier, 1 / 5, 10)]
    assert found.epsilon == engine.get_epsilon(1e-4) <= 3.0
    back = plan(230, 50, steps=10, noise_multiplier=found.noise_multiplier, delta=1e-4,
                accountant="rdp")  # fmt: skip
    assert back == found


def test_quantities_by_hand() -> None:
    found = plan(10_000, 400, epochs=1, noise_multiplier=2.0, accountant="gdp")
    assert found.delta == 1e-5 and found.delta_is_small
    assert found.noise_per_coordinate == 2 / 400
    assert found.noise_over_signal(1_000_000) == pytest.approx(1000 * 2 / 400)
    assert found.micro_batches(64) == 7 and found.micro_batches(400) == 1
    assert found.largest_batch == math.ceil(400 + 4 * math.sqrt(400 * 0.96))
    (less, same), (_, more) = found.over([200, 400], [0.5, 1.0])
    assert more == found and less.epsilon < same.epsilon < more.epsilon
    assert not plan(
        50, 10, steps=1, noise_multiplier=1.0, delta=0.05, accountant="gdp"
    ).delta_is_small


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epochs": 1, "steps": 2, "epsilon": 1.0}, "epochs=1 and steps=2"),
        ({"epochs": 1}, "epsilon=None and noise_multiplier=None"),
        ({"epochs": 1, "epsilon": 1.0, "batch_size": 11}, r"batch_size: found 11; .* in \[1, 10\]"),
    ],
)
def test_what_no_run_can_have_is_refused(given: dict[str, float], words: str) -> None:
    with raises("FC302|FC930", ValueError, match=words):
        plan(**({"samples": 10, "batch_size": 2} | given))  # type: ignore[arg-type]


def test_the_first_bound_of_the_page() -> None:
    """The page's own lines, and the norms by autograd; the model is as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    names: dict[str, Any] = {"model": model, "x": torch.randn(9, 3), "y": torch.arange(9) % 2}
    names |= {"copy": copy, "F": F, "GradSampleModuleFlashClipping": GradSampleModuleFlashClipping}
    exec(block("tested: first bound", "docs/planning.md"), names)  # noqa: S102
    losses = F.cross_entropy(model(names["x"]), names["y"], reduction="none")
    grads = [torch.autograd.grad(loss, [*model.parameters()], retain_graph=True) for loss in losses]
    norms = torch.stack([torch.cat([g.flatten() for g in of_one]).norm() for of_one in grads])
    assert names["bound"] == pytest.approx(float(norms.median()), rel=1e-5)
    assert not hasattr(model, "autograd_grad_sample_hooks")


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["plan", "--dataset-size", "1000", "--batch-size", "50", "--epochs", "2",
             "--accountant", "gdp", "--noise-multiplier", "1"]  # fmt: skip
    assert main([*asked, "--max-physical-batch-size", "16", "--parameters", "10000"]) == 0
    out = capsys.readouterr().out
    assert "4 of 16 at most" in out and "add or remove one sample" in out
    assert "norm of noise over largest signal" in out and "by expected batch and epochs" in out
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 40 and told["epsilon"] > 0
    assert main([*asked, "--delta", "0.0100001", "--quiet"]) == 0
    said = capsys.readouterr()
    assert "flash-clipping: warning: δ = 0.01 is not below 1 / 1,000" in said.err
    assert " at δ = 0.01;" in said.out
    assert main([*asked, "--steps", "3"]) == 2
    assert "and --steps 3; expected one of them" in capsys.readouterr().err


def test_a_plot_has_a_line_at_the_target_and_plain_ticks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    save = figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda self, *to: (drawn.append(self), save(self, *to))
    )
    asked = ["plan", "--samples", "3000", "--batch-size", "50", "--epochs", "10"]
    asked += ["--accountant", "gdp", "--plot", str(tmp_path / "plan.png")]
    for noise in (["--epsilon", "3"], ["--noise-multiplier", "2"]):
        assert main([*asked, *noise]) == 0
    assert (tmp_path / "plan.png").stat().st_size > 1000
    targets = [
        [line.get_ydata()[0] for line in figure.axes[0].lines if line.get_linestyle() == "--"]
        for figure in drawn
    ]
    assert targets == [[3.0], []]
    axes = drawn[0].axes[0]
    shown = [tick.get_text() for tick in axes.get_xticklabels(which="both")]
    assert shown == ["5", "10", "20", "40"] and axes.get_ylabel() == "ε at δ = 3.33e-05"
