"""Noise that steps take back, against independent noise, at equal ε, on handwritten digits.

    python examples/correlated_noise.py --seeds 5

Prints the accuracy on held-out digits, mean and spread over seeds. All runs have the same ε, δ,
model, learning rate and number of epochs. Poisson sampling is there as well: where a batch is a
small part of the data, its amplification is worth more than what correlation gives.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import CyclicPoisson, FixedOrder, FlashPrivacyEngine, PoissonSampling
from flash_clipping.noise import BandedInverseNoise, BandedNoise, BufferedNoise, Mechanism
from flash_clipping.randomness import SeededNoiseWarning

DELTA = 1e-4
HELD_OUT = 400

#: How batches are drawn and noise is made, for so many steps and batches in an epoch.
RUNS: dict[str, Callable[[int, int], Mechanism]] = {
    "fixed order, independent": lambda steps, batches: FixedOrder(),
    "fixed order, one step taken back": lambda steps, batches: FixedOrder(BandedInverseNoise(2)),
    "fixed order, 8 diagonals": lambda steps, batches: FixedOrder(BandedNoise(8)),
    "fixed order, inverse of 8": lambda steps, batches: FixedOrder(BandedInverseNoise(8)),
    "fixed order, inverse of 4, optimised": lambda steps, batches: FixedOrder(
        BandedInverseNoise.optimised(4, steps, batches)
    ),
    "fixed order, 2 buffers": lambda steps, batches: FixedOrder(
        BufferedNoise.optimised(2, steps, batches)
    ),
    "Poisson, independent": lambda steps, batches: PoissonSampling(),
    "cyclic Poisson, 4 diagonals": lambda steps, batches: CyclicPoisson(BandedNoise(4)),
}


def data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def train(
    name: str, *, seed: int, epsilon: float, epochs: int, batch_size: int
) -> tuple[float, str]:
    """Accuracy on held-out digits, and what ε compares."""
    make = RUNS[name]
    torch.manual_seed(seed)
    model = nn.Linear(64, 10)
    train_set, test_set = data()
    plain_loader = DataLoader(train_set, batch_size=batch_size)
    # A seed, so that runs can be repeated: never where a model is released.
    engine = FlashPrivacyEngine(accountant="pld", seed=seed)
    module, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
        criterion=nn.CrossEntropyLoss(),
        data_loader=plain_loader,
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=1.0,
        mechanism=make(epochs * len(plain_loader), len(plain_loader)),
    )
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        x, y = test_set.tensors
        accuracy = float((model(x).argmax(1) == y).float().mean())
    return accuracy, engine.relation


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (%(default)s)")
    parser.add_argument("--epsilon", type=float, default=2.0, help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--only", choices=RUNS, nargs="*", default=list(RUNS), help="these kinds")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", SeededNoiseWarning)
    found: dict[str, list[float]] = {}
    print(f"ε = {options.epsilon:g} at δ = {DELTA:g}, {options.epochs} epochs")
    for name in options.only:
        runs = [
            train(
                name,
                seed=seed,
                epsilon=options.epsilon,
                epochs=options.epochs,
                batch_size=options.batch_size,
            )
            for seed in range(options.seeds)
        ]
        found[name] = [accuracy for accuracy, _ in runs]
        spread = statistics.stdev(found[name]) if options.seeds > 1 else 0.0
        mean = statistics.mean(found[name])
        print(f"{name:38} {mean:.1%} ± {spread:.1%}   ({runs[0][1]})")
    return found


if __name__ == "__main__":
    main()
