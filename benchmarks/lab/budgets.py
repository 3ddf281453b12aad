"""``budgets``: what the examples' runs spend, and what noise that ends earlier would add to it."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from opacus.accountants import PRVAccountant
from opacus.accountants.utils import get_noise_multiplier
from rich.console import Console

from benchmarks.report import table
from flash_clipping.noise.accountants import PldAccountant
from flash_clipping.noise.process import MechanismSpec

#: Where noise ends, in standard deviations: ``torch.normal`` in fp32 on a CPU, and ours.
END_OF_TORCH_NORMAL = math.sqrt(2 * 24 * math.log(2))
END_HERE = math.sqrt(2 * 66 * math.log(2))


@dataclass(frozen=True)
class Budget:
    """The defaults of an example with ordinary Poisson batches.

    Args:
        name: of the example.
        samples: in its training set, N.
        sample_rate: with which a step draws each of them, q.
        steps: T.
        epsilon: that noise is computed for.
        delta: its δ.
    """

    name: str
    samples: int
    sample_rate: float
    steps: int
    epsilon: float
    delta: float

    def noise_multiplier(self) -> float:
        """By Opacus' accountant of privacy loss distributions, as the examples have it."""
        return float(
            get_noise_multiplier(
                target_epsilon=self.epsilon,
                target_delta=self.delta,
                sample_rate=self.sample_rate,
                steps=self.steps,
                accountant="prv",
            )
        )

    def largest_batch(self) -> int:
        """The size that docs/sampling.md recommends, ``q N + 4 sqrt(q N)``."""
        expected = self.sample_rate * self.samples
        return math.ceil(expected + 4 * math.sqrt(expected))

    def epsilon_of_one_shape(self, noise_multiplier: float) -> float:
        """With the same noise, and every batch of :meth:`largest_batch` rows."""
        accountant = PldAccountant()
        accountant.process = MechanismSpec(
            samples=self.samples, max_batch_size=self.largest_batch()
        )
        accountant.history = [(noise_multiplier, self.sample_rate, self.steps)]
        return accountant.get_epsilon(self.delta)

    def exposure(self, noise_multiplier: float, end: float) -> float:
        """Probability that an output of some step is beyond what noise alone reaches.

        One sample of the clipping bound moves a coordinate by ``1 / noise_multiplier`` standard
        deviations. Without it no such output exists, so that no ε holds for a δ below this.

        Args:
            noise_multiplier: standard deviation of the noise, in clipping bounds.
            end: of the noise, in standard deviations.
        """
        moved = _tail(end - 1 / noise_multiplier) - _tail(end)
        return -math.expm1(self.steps * math.log1p(-self.sample_rate * moved))


#: tests/benchmarks/test_budgets.py compares them with the examples.
EXAMPLES = (
    Budget("digits", 1437, 1 / 3, 120, 3.0, 1e-5),
    Budget("images", 1437, 1 / 3, 60, 3.0, 1e-5),
    Budget("language_model", 6566, 1 / 20, 240, 8.0, 1e-5),
    Budget("lora", 1743, 1 / 7, 80, 3.0, 1e-4),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "budgets", help="ε of the examples, and what noise that ends earlier would add to δ"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Print what the end of the noise exposes in each example."""
    headings = ["example", "`N`, `q`, `T`", "`z`", "δ", "ε", "exposed before", "ε before"]
    headings += ["exposed now", "one shape: rows, ε"]
    lines = []
    for budget in EXAMPLES:
        z = budget.noise_multiplier()
        accountant = PRVAccountant()
        accountant.history = [(z, budget.sample_rate, budget.steps)]
        epsilon = accountant.get_epsilon(budget.delta)
        before = budget.exposure(z, END_OF_TORCH_NORMAL)
        lines.append(
            [
                f"`{budget.name}`",
                f"{budget.samples}, 1/{round(1 / budget.sample_rate)}, {budget.steps}",
                f"{z:.2f}",
                f"{budget.delta:.0e}",
                f"{epsilon:.2f}",
                f"{before:.1e}",
                "∞" if before > budget.delta else f"{epsilon:.2f} at best",
                f"{budget.exposure(z, END_HERE):.1e}",
                f"{budget.largest_batch()}, {budget.epsilon_of_one_shape(z):.2f}",
            ]
        )
    console.print(table(headings, lines), markup=False)
    return 0


def _tail(t: float) -> float:
    """Probability that a normal is above `t`."""
    return math.erfc(t / math.sqrt(2)) / 2
