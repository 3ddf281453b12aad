"""Private image classification: scikit-learn's handwritten digits, a small GroupNorm network.

    python examples/digits.py                  # flash clipping, ε ≤ 3 at δ = 1e-5
    python examples/digits.py --method hooks   # the same with Opacus' per-sample gradients

One sample (one image with its label) is the unit of privacy. B samples, H = W = 8 pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn
from training import InMemoryDataset, Report, Task, argument_parser, run

TEST_SIZE = 360  # of 1797 images


def network() -> nn.Sequential:
    """12 k parameters; GroupNorm because BatchNorm would mix the samples of a batch."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.GroupNorm(4, 32),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def data(device: str) -> tuple[InMemoryDataset, torch.Tensor, torch.Tensor]:
    """The training set and the test images and labels; the split does not depend on the seed."""
    pixels, labels = load_digits(return_X_y=True)
    x_B1HW = torch.tensor(pixels, dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 8 - 1
    y_B = torch.tensor(labels, dtype=torch.long, device=device)
    order_B = torch.randperm(len(y_B), generator=torch.Generator().manual_seed(0)).to(device)
    test_B, train_B = order_B[:TEST_SIZE], order_B[TEST_SIZE:]
    return InMemoryDataset(x_B1HW[train_B], y_B[train_B]), x_B1HW[test_B], y_B[test_B]


def main(argv: Sequence[str] | None = None) -> Report:
    parser = argument_parser(
        "Train on scikit-learn's digits, privately.",
        epochs=40,
        batch_size=480,
        lr=0.01,
        epsilon=3,
        threads=1,  # a second one only waits: the layers are too small to share
    )
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    train, x_B1HW, y_B = data(args.device)

    def accuracy(model: nn.Module) -> float:
        return (model(x_B1HW).argmax(dim=1) == y_B).float().mean().item()

    task = Task(
        name="digits",
        model=network(),
        criterion=nn.CrossEntropyLoss(),
        train=train,
        evaluate=accuracy,
        metric="test accuracy",
        metric_format="{:.1%}",
    )
    return run(args, task)


if __name__ == "__main__":
    main()
