"""Plans of runs: against the engine, by hand, and as a command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine
from flash_clipping.__main__ import main
from flash_clipping.planning import first_bound, plan
from tests.support.autograd import truth_by_autograd
from tests.support.errors import raises


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
    cheap = found.trial(100)
    assert cheap.noise_per_coordinate == found.noise_per_coordinate
    assert (cheap.noise_multiplier, cheap.steps, cheap.batch_size) == (0.5, 25, 100)
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


def test_a_first_bound_is_a_quantile_of_the_norms() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(9, 3, dtype=torch.float64)

    def losses(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = model(batch).square().sum(1)
        return out

    truth = truth_by_autograd(model, (x,), lambda m, batch: losses(m, *batch).sum())
    model[0].weight.grad = torch.ones(4, 3, dtype=torch.float64)
    kept = model[0].weight.grad
    found = first_bound(model, x.split(4), losses, quantile=0.25)
    assert found == pytest.approx(float(truth.norms.quantile(0.25)), rel=1e-9)
    assert model[0].weight.grad is kept and not model[0]._forward_hooks
    assert not hasattr(model, "autograd_grad_sample_hooks")
    with raises("FC931", ValueError):
        first_bound(model, [], losses)


class Small(nn.Module):
    """Runs out of memory above so many samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.out, self.most, self.tried = nn.Linear(3, 1), most, 0

    def forward(self, x: Tensor) -> Tensor:
        self.tried = max(self.tried, len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        out: Tensor = self.out(x)
        return out


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
    with pytest.raises(SystemExit) as ended:
        main([*asked, "--steps", "3"])
    assert ended.value.code == 2
    assert "--steps: not allowed with argument --epochs" in capsys.readouterr().err


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
