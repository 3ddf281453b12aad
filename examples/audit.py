"""Audit the privacy of a training run with canaries: does ε hold in practice?

    python examples/audit.py            # the lower bound stays under the accountant's ε
    python examples/audit.py --broken   # clipping 50 times too loose: the audit notices
    python examples/audit.py --sampling random_allocation
    python examples/audit.py --model current   # experts with LoRA, product keys, hyper-connections
    python examples/audit.py --noise buffers   # noise that later steps take back

One training run is enough (``flash_clipping.auditing`` says why, and has the bounds). Every canary
owns one input feature, so its gradient points where no other sample's does, and the score reads
that feature's weights from the trained model: as strong as it is easy. Exit status: 0 when the run
shows what it should.

B samples, H = W = 8 pixels, M canaries, each with its feature.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from canaries import Canaries
from language_model import CURRENT, blocks, through
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training import InMemoryDataset

from flash_clipping import FixedOrder, FlashPrivacyEngine, PoissonSampling, RandomAllocation
from flash_clipping.auditing import Audit
from flash_clipping.noise import BandedInverseNoise, BufferedNoise, Mechanism, NoiseMechanism

CLASSES = 10
# A canary's gradient must be longer than a broken bound lets through, or breaking changes nothing.
CANARY_SCALE = 100.0
BROKEN_FACTOR = 50.0


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


def mechanism_of(noise: str, sampling: str, steps: int, batches: int) -> tuple[str, Mechanism]:
    """The accountant, and the mechanism, for so many steps and batches in an epoch."""
    if noise == "discrete":
        return "discrete_gaussian", PoissonSampling(noise_grid="exact")
    correlated: dict[str, Callable[[], NoiseMechanism]] = {
        "inverse": lambda: BandedInverseNoise.optimised(3, steps, batches),
        "buffers": lambda: BufferedNoise.optimised(2, steps, batches),
    }
    if noise in correlated:
        return "pld", FixedOrder(correlated[noise]())
    return ("prv", PoissonSampling()) if sampling == "poisson" else ("pld", RandomAllocation())


NOISES = ("independent", "inverse", "buffers", "discrete")


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


def audit(args: argparse.Namespace, console: Console) -> Audit:
    """Throw the coins, train once, guess, and bound."""
    torch.manual_seed(args.seed)
    m = args.canaries
    label_M = torch.randint(0, CLASSES, (m,))
    canaries = Canaries(TensorDataset(label_M), seed=args.seed)
    included_M = canaries.included_M

    pixels, digits = load_digits(return_X_y=True)
    x = torch.tensor(pixels[: args.samples], dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(digits[: args.samples], dtype=torch.long)
    number_M, image_M = 1 + torch.arange(m), torch.zeros(m, 1, 8, 8)
    steps = args.epochs * args.batches
    accountant, mechanism = mechanism_of(args.noise, args.sampling, steps, args.batches)
    rows_M = included_M
    if isinstance(mechanism, FixedOrder):
        # Epsilon is for zeroing a sample out: all canaries have their places. A sample that is not
        # finite adds nothing.
        rows_M = torch.ones_like(included_M)
        image_M[~included_M] = math.nan
    data = InMemoryDataset(
        torch.cat([x, image_M[rows_M]]),
        torch.cat([torch.zeros(len(x), dtype=torch.long), number_M[rows_M]]),
        torch.cat([y, label_M[rows_M]]),
    )

    model = AuditedModel(m, MODELS[args.model]()).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = data.loader(math.ceil(len(data) / args.batches))
    engine = FlashPrivacyEngine(accountant=accountant)
    private, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        epochs=args.epochs,
        max_grad_norm=args.max_grad_norm,
        mechanism=mechanism,
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
    return canaries.audit(
        score_M,
        guesses=args.guesses,
        epsilon=engine.get_epsilon(args.delta),
        relation=engine.relation,
        delta=args.delta,
        confidence=args.confidence,
        gaussian=args.gaussian,
    )


def show(found: Audit, broken: bool, console: Console) -> None:
    clipping = f"clipping broken on purpose ({BROKEN_FACTOR:g} C)" if broken else "flash clipping"
    table = Table(title=f"one-run audit of {clipping}")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    for row in found.rows():
        table.add_row(*row)
    console.print(table)
    console.print(f"[{'bold red' if found.violated else 'green'}]{found.verdict}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Audit a private training run with canaries.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--broken", action="store_true", help="clip 50 times too loosely")
    parser.add_argument("--gaussian", action="store_true", help="the tighter bound, of Gaussians")
    parser.add_argument("--model", choices=tuple(MODELS), default="convolutions")
    parser.add_argument("--noise", choices=NOISES, default="independent")
    samplings = ("poisson", "random_allocation")
    parser.add_argument(
        "--sampling", choices=samplings, default="poisson", help="of independent noise"
    )
    parser.add_argument("--canaries", type=int, default=1000, help="coins to throw")
    parser.add_argument("--guesses", type=int, default=300, help="canaries not to abstain on")
    parser.add_argument("--samples", type=int, default=1000, help="other training data")
    parser.add_argument("--epsilon", type=float, default=4.0, help="privacy budget of the run")
    parser.add_argument("--delta", type=float, default=1e-5, help="δ of the (ε, δ) guarantee")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batches", type=int, default=4, help="batches per epoch")
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
    warnings.filterwarnings("ignore", message="The gradient of at least one sample was not finite")
    found = audit(args, console)
    show(found, args.broken, console)
    return found


if __name__ == "__main__":
    # A broken run must be found out; an intact one must not be.
    sys.exit(main().violated != parse(None).broken)
