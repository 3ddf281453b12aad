"""Audit the privacy of a training run with canaries: does ε hold in practice?

    python examples/audit.py            # the lower bound stays under the accountant's ε
    python examples/audit.py --broken   # clipping 50 times too loose: the audit notices
    python examples/audit.py --model current   # experts with LoRA, product keys, hyper-connections

One training run is enough (Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training
Run", NeurIPS 2023, arXiv:2305.08846). Each of m canaries is put into the training data by a fair
coin. After training, the auditor ranks the canaries by a score, guesses "in" for the highest and
"out" for the lowest, and abstains on the rest. If training is (ε, δ)-private, too many right
guesses are improbable, whatever the score; what is improbable below some ε is a lower bound on ε.

The score decides only how tight the bound is. Here it is as strong as it is easy: every canary
owns one input feature, so its gradient points where no other sample's does, and the score reads
that feature's weights from the trained model. A wrong lower bound above ε needs bad luck of 5 %
(``--confidence``); a wrong ε needs a bug. Exit status: 0 when the run shows what it should.

m canaries, r guesses, v of them right. B samples, H = W = 8 pixels, M = m canary features.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from language_model import CURRENT, blocks, through
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from scipy.stats import binom
from sklearn.datasets import load_digits
from torch import Tensor, nn
from training import InMemoryDataset

from flash_clipping import FlashPrivacyEngine

CLASSES = 10
# A canary's gradient must be longer than a broken bound lets through, or breaking changes nothing.
CANARY_SCALE = 100.0
BROKEN_FACTOR = 50.0


# -- the bound ------------------------------------------------------------------------------------


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float = 0.0) -> float:
    """Most probable that ``correct`` or more of ``guesses`` are right under (ε, δ)-privacy.

    Theorem 5.2 and Corollary 5.4 of the paper. Let ``W ~ Binomial(r, e^ε / (1 + e^ε))``; under pure
    ε-privacy the number of right guesses is stochastically dominated by ``W``, and δ adds at most
    ``2 m δ max_{i ≥ 1} P[v - i ≤ W < v] / i``.

    Args:
        canaries: m, how many coins were thrown.
        guesses: r, how many canaries the auditor did not abstain on.
        correct: v, how many guesses were right.
        epsilon: ε of the hypothesis.
        delta: δ of the hypothesis.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"expected 0 <= correct <= guesses <= canaries, found {correct}, {guesses}, {canaries}."
        )
    right = 1.0 / (1.0 + math.exp(-epsilon))
    tail = binom.sf(correct - 1, guesses, right)
    if delta == 0 or correct == 0:
        return float(tail)
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
    slack = np.max(below / np.arange(1, correct + 1))
    return float(min(1.0, tail + 2 * canaries * delta * slack))


def epsilon_lower_bound(
    canaries: int, guesses: int, correct: int, delta: float = 0.0, confidence: float = 0.95
) -> float:
    """The ε below which this many right guesses are improbable: every smaller ε is rejected."""
    significance = 1.0 - confidence

    def rejected(epsilon: float) -> bool:
        return p_value(canaries, guesses, correct, epsilon, delta) < significance

    # Step by step first, as δ's part need not grow with ε: the first ε that is not rejected counts.
    step, low = 1 / 16, 0.0
    if not rejected(low):
        return 0.0
    while rejected(low + step):
        low += step
    high = low + step
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low


# -- the run that is audited ----------------------------------------------------------------------


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, stride=2),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, CLASSES),
    )


class CurrentLayers(nn.Module):
    """An image as a sequence of its rows, read by a block of the language model's."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, CURRENT.d)
        self.blocks = blocks(CURRENT, layers=1)
        self.classes = nn.Linear(CURRENT.d, CLASSES)

    def forward(self, x_B1HW: Tensor) -> Tensor:
        x_BHd = self.rows(x_B1HW.squeeze(1))
        return self.classes(through(self.blocks, x_BHd, CURRENT).mean(1))


MODELS = {"convolutions": convolutions, "current": CurrentLayers}


class AuditedModel(nn.Module):
    """A small image classifier, and one input feature for each canary."""

    def __init__(self, canaries: int, image: nn.Module):
        super().__init__()
        self.canaries = canaries
        self.image = image
        self.feature = nn.Linear(canaries, CLASSES, bias=False)
        nn.init.zeros_(self.feature.weight)

    def forward(self, x_B1HW: Tensor, canary_B: Tensor) -> Tensor:
        # Number 0 is no canary: its column is cut off.
        one_hot_BM = F.one_hot(canary_B, self.canaries + 1)[:, 1:].to(x_B1HW.dtype)
        return self.image(x_B1HW) + self.feature(CANARY_SCALE * one_hot_BM)


@dataclass
class Audit:
    """What the auditor found, and what was promised."""

    canaries: int
    included: int
    guesses: int
    correct: int
    delta: float
    confidence: float
    epsilon: float  # the accountant's
    lower_bound: float
    broken: bool = False  # on purpose

    @property
    def violated(self) -> bool:
        """Whether the run leaked more than the accountant says."""
        return self.lower_bound > self.epsilon

    @property
    def as_expected(self) -> bool:
        """A broken run must be found out; an intact one must not be."""
        return self.violated == self.broken


def audit(args: argparse.Namespace, console: Console) -> Audit:
    """Throw the coins, train once, guess, and bound."""
    torch.manual_seed(args.seed)
    m = args.canaries
    label_M = torch.randint(0, CLASSES, (m,))
    included_M = torch.rand(m) < 0.5

    pixels, digits = load_digits(return_X_y=True)
    x = torch.tensor(pixels[: args.samples], dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(digits[: args.samples], dtype=torch.long)
    number_in = 1 + included_M.nonzero().flatten()
    data = InMemoryDataset(
        torch.cat([x, torch.zeros(len(number_in), 1, 8, 8)]),
        torch.cat([torch.zeros(len(x), dtype=torch.long), number_in]),
        torch.cat([y, label_M[included_M]]),
    )

    model = AuditedModel(m, MODELS[args.model]()).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = data.loader(math.ceil(len(data) / args.batches))
    engine = FlashPrivacyEngine()
    private, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        epochs=args.epochs,
        max_grad_norm=args.max_grad_norm,
    )
    if args.broken:
        # On purpose: samples are clipped to 50 C, while the noise is still that for C. It would
        # follow private.max_grad_norm, so norms are taken for 50 times smaller than they are.
        coefficients = private._coefficients
        private._coefficients = lambda norm_B: coefficients(norm_B / BROKEN_FACTOR)

    progress = Progress(
        TextColumn("training"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        expand=True,
    )
    with progress:
        bar = progress.add_task("training", total=args.epochs * len(loader))
        for _ in range(args.epochs):
            for x_B1HW, canary_B, y_B in loader:
                optimizer.zero_grad()
                output = private(x_B1HW.to(args.device), canary_B.to(args.device))
                criterion(output, y_B.to(args.device)).backward()
                optimizer.step()
                progress.advance(bar)

    weight_MC = model.feature.weight.detach().cpu().mT
    score_M = weight_MC.gather(1, label_M[:, None]).squeeze(1) - weight_MC.mean(1)
    correct = right_guesses(score_M, included_M, args.guesses)
    return Audit(
        canaries=m,
        included=int(included_M.sum()),
        guesses=args.guesses,
        correct=correct,
        delta=args.delta,
        confidence=args.confidence,
        epsilon=engine.get_epsilon(args.delta),
        lower_bound=epsilon_lower_bound(m, args.guesses, correct, args.delta, args.confidence),
        broken=args.broken,
    )


def right_guesses(score_M: Tensor, included_M: Tensor, guesses: int) -> int:
    """Guess "in" for the highest half of the guesses' scores, "out" for the lowest; count hits."""
    order_M = score_M.argsort(descending=True)
    high = guesses - guesses // 2
    hits = included_M[order_M[:high]].sum()
    if guesses // 2:
        hits = hits + (~included_M[order_M[-(guesses // 2) :]]).sum()
    return int(hits)


def show(found: Audit, console: Console) -> None:
    clipping = "flash clipping"
    if found.broken:
        clipping = f"clipping broken on purpose ({BROKEN_FACTOR:g} C)"
    table = Table(title=f"one-run audit of {clipping}")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    table.add_row("canaries (in the data)", f"{found.canaries} ({found.included})")
    table.add_row("guesses", f"{found.guesses}")
    table.add_row("right", f"{found.correct} ({found.correct / found.guesses:.1%})")
    table.add_row(f"ε, lower bound ({found.confidence:.0%} confidence)", f"{found.lower_bound:.2f}")
    table.add_row(f"ε, accountant (δ = {found.delta:g}; add or remove one)", f"{found.epsilon:.2f}")
    console.print(table)
    if found.violated:
        console.print("[bold red]The run leaked more than the accountant says.")
    else:
        console.print("[green]Nothing contradicts the accountant.")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Audit a private training run with canaries.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--broken", action="store_true", help="clip 50 times too loosely")
    parser.add_argument("--model", choices=tuple(MODELS), default="convolutions")
    parser.add_argument("--canaries", type=int, default=1000, help="coins to throw")
    parser.add_argument("--guesses", type=int, default=300, help="canaries not to abstain on")
    parser.add_argument("--samples", type=int, default=1000, help="other training data")
    parser.add_argument("--epsilon", type=float, default=4.0, help="privacy budget of the run")
    parser.add_argument("--delta", type=float, default=1e-5, help="δ of the (ε, δ) guarantee")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batches", type=int, default=4, help="Poisson batches per epoch")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of SGD")
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="clipping bound C")
    parser.add_argument("--confidence", type=float, default=0.95, help="of the lower bound")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not 0 < args.guesses <= args.canaries:
        parser.error(f"--guesses must be between 1 and --canaries ({args.canaries}).")
    return args


def main(argv: Sequence[str] | None = None) -> Audit:
    args = parse(argv)
    console = Console()
    # A real release turns secure_mode on; an audit is to be repeatable. The others are expected.
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings("ignore", message="Optimal order is the")
    found = audit(args, console)
    show(found, console)
    return found


if __name__ == "__main__":
    sys.exit(0 if main().as_expected else 1)
