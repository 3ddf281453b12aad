"""Private image classification: a Wide ResNet that sees several views of every image.

    python examples/images.py                                   # digits, a small network, ε ≤ 3
    python examples/images.py --data cifar10 --device cuda      # WRN-16-4, batches of 4096, ε ≤ 8
    python examples/images.py --plot runs/images.svg            # draws the run

The recipe is that of "Unlocking High-Accuracy Differentially Private Image Classification through
Scale" (De, Berrada, Hayes, Smith and Balle, 2022, arXiv:2204.13650): GroupNorm, standardized
weights, large batches, SGD without momentum at a constant rate, K augmented views of every image
(augmentation multiplicity), and an exponential moving average of the weights.

The unit of privacy is an image. Its views are rows of the batch, and one sample: their losses are
averaged before anything is clipped. In examples/, `flash-clipping check images:subject` compares
the gradients with those of one image at a time.

B images, K views of each, R = B·K rows, C channels, H × W pixels; o output and i input channels of
a convolution with a kernel of h × w.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from digits import data as digits
from opacus.utils.batch_memory_manager import BatchMemoryManager
from plots import Curves, draw
from torch import Tensor, nn
from training import InMemoryDataset

from flash_clipping import Documents, FlashPrivacyEngine
from flash_clipping.trainers.dashboard import ClippingStatistics, line

# -- the network ----------------------------------------------------------------------------------


def standardized(weight_oihw: Tensor) -> Tensor:
    """Every output channel's weights with mean 0 and squares that add up to 1.

    Weight standardization (Qiao et al., 2019, arXiv:1903.10520), divided by the square root of how
    many weights the channel has, so that the scale of activations is kept.
    """
    centered = weight_oihw - weight_oihw.mean((1, 2, 3), keepdim=True)
    return centered * torch.rsqrt(centered.square().sum((1, 2, 3), keepdim=True) + 1e-4)


class StandardizedConv2d(nn.Conv2d):
    """A convolution with `standardized` weights.

    It overrides `forward`, so the rule of `nn.Conv2d` does not serve it. Gradients are those of the
    weight that is trained, not of the one that the image meets.
    """

    def forward(self, x_RCHW: Tensor) -> Tensor:
        return self._conv_forward(x_RCHW, standardized(self.weight), self.bias)


def convolution(i: int, o: int, kernel: int = 3, stride: int = 1) -> nn.Module:
    return StandardizedConv2d(i, o, kernel, stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """Two convolutions behind GroupNorm and ReLU, beside a shortcut."""

    def __init__(self, i: int, o: int, stride: int, groups: int):
        super().__init__()
        self.norm_1, self.conv_1 = nn.GroupNorm(groups, i), convolution(i, o, stride=stride)
        self.norm_2, self.conv_2 = nn.GroupNorm(groups, o), convolution(o, o)
        self.shortcut = None if i == o and stride == 1 else convolution(i, o, 1, stride)

    def forward(self, x_RCHW: Tensor) -> Tensor:
        y = F.relu(self.norm_1(x_RCHW))
        kept = x_RCHW if self.shortcut is None else self.shortcut(y)
        return kept + self.conv_2(F.relu(self.norm_2(self.conv_1(y))))


class WideResNet(nn.Module):
    """WRN-depth-width (Zagoruyko and Komodakis, 2016, arXiv:1605.07146), with GroupNorm.

    Args:
        channels: of an image.
        depth: 6 n + 4, for n blocks in each of three stages.
        width: stages have 1, 2 and 4 times `stem · width` channels.
        groups: of every GroupNorm.
        stem: channels of the first convolution; 16 in the paper.
        classes: outputs.
    """

    def __init__(
        self, channels: int, depth: int, width: int, groups: int, stem: int = 16, classes: int = 10
    ):
        super().__init__()
        blocks, rest = divmod(depth - 4, 6)
        if rest or blocks < 1:
            raise ValueError(f"WideResNet: found depth={depth}; expected 10, 16, 22, …: 6 n + 4.")
        layers: list[nn.Module] = [convolution(channels, stem)]
        i = stem
        for o, stride in ((stem * width, 1), (2 * stem * width, 2), (4 * stem * width, 2)):
            for number in range(blocks):
                layers.append(Block(i, o, stride if number == 0 else 1, groups))
                i = o
        self.layers = nn.Sequential(*layers)
        self.norm = nn.GroupNorm(groups, i)
        self.head = nn.Linear(i, classes)

    def forward(self, x_RCHW: Tensor) -> Tensor:
        y = F.relu(self.norm(self.layers(x_RCHW)))
        return self.head(y.mean((2, 3)))


# -- data and views -------------------------------------------------------------------------------


@dataclass
class Images:
    """Training and test images `[N, C, H, W]`, and how an image may be changed."""

    train: InMemoryDataset
    test_x: Tensor
    test_y: Tensor
    shift: int  # at most so many pixels
    flip: bool  # also left to right


def load(args: argparse.Namespace) -> Images:
    if args.data == "digits":
        return Images(*digits(args.device), shift=1, flip=False)  # a mirrored 2 is no 2
    try:
        from torchvision.datasets import CIFAR10
    except ImportError:
        sys.exit("--data cifar10 needs torchvision: pip install torchvision")
    try:
        train, test = (
            CIFAR10(args.root, train=part, download=args.download) for part in (True, False)
        )
    except RuntimeError as error:
        sys.exit(f"CIFAR-10 is not in {args.root} ({error}): give its --root, or add --download")
    (train_x, train_y), (test_x, test_y) = (
        (
            torch.tensor(part.data, device=args.device).movedim(3, 1).float() / 127.5 - 1,
            torch.tensor(part.targets, device=args.device),
        )
        for part in (train, test)
    )
    return Images(InMemoryDataset(train_x, train_y), test_x, test_y, shift=4, flip=True)


def views(x_BCHW: Tensor, k: int, shift: int, flip: bool) -> Tensor:
    """K views of every image, one after the other: `[B·K, C, H, W]`.

    Each is moved by up to `shift` pixels in both directions (what comes in is the mirrored edge)
    and, with `flip`, mirrored with probability 1/2. No view looks at another image.
    """
    H, W = x_BCHW.shape[2:]
    x_RCHW = x_BCHW.repeat_interleave(k, 0)
    R, device = len(x_RCHW), x_RCHW.device
    top_R, left_R = torch.randint(0, 2 * shift + 1, (2, R), device=device)
    row_RH = top_R[:, None] + torch.arange(H, device=device)
    column_RW = left_R[:, None] + torch.arange(W, device=device)
    if flip:
        mirrored_R1 = torch.rand(R, 1, device=device) < 0.5
        column_RW = torch.where(mirrored_R1, column_RW.flip(1), column_RW)
    padded = F.pad(x_RCHW, (shift,) * 4, mode="reflect")
    number_R11 = torch.arange(R, device=device)[:, None, None]
    return padded[number_R11, :, row_RH[:, :, None], column_RW[:, None, :]].movedim(3, 1)


# -- training -------------------------------------------------------------------------------------


class Average:
    """The exponential moving average of a model's weights; it costs no privacy.

    In step t it keeps `min(decay, (1 + t) / (10 + t))` of what it was, so that early weights are
    forgotten.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.steps = decay, 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.steps += 1
        kept = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for mean, param in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.lerp_(param, 1 - kept)


@dataclass
class Run:
    """What a run leaves behind; points are (step, value)."""

    loss: list[tuple[int, float]] = field(default_factory=list)
    accuracy: list[tuple[int, float]] = field(default_factory=list)  # of averaged weights
    epsilon: list[tuple[int, float]] = field(default_factory=list)
    median_norm: list[tuple[int, float]] = field(default_factory=list)
    clipped_share: list[tuple[int, float]] = field(default_factory=list)
    last_accuracy: float = 0.0  # of the weights themselves
    seconds: float = 0.0


def item_of_row(items: int, k: int, device: Any) -> Tensor:
    """Which image each of `items · k` rows is a view of."""
    return torch.arange(items, device=device).repeat_interleave(k)


def train(args: argparse.Namespace, images: Images, plain: nn.Module) -> Run:
    """The loop; every `--every` steps it prints a line and looks at the test images."""
    average = Average(plain, args.ema)
    loader = images.train.loader(args.batch_size)
    engine = FlashPrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=plain,
        optimizer=torch.optim.SGD(plain.parameters(), lr=args.lr),
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        epochs=args.epochs,
        max_grad_norm=args.max_grad_norm,
        unit=Documents("item"),  # rows with one number are one sample
    )
    total = args.epochs * len(loader)
    run, statistics = Run(), ClippingStatistics(model)
    losses: list[Tensor] = []  # of images, still on the device: reading one would wait
    began = time.perf_counter()

    def look(step: int) -> None:
        reading, epsilon = statistics.read(), engine.get_epsilon(args.delta)
        values = torch.cat(losses) if losses else torch.tensor([float("nan")])
        losses.clear()
        run.loss.append((step, values.mean().item()))
        run.epsilon.append((step, epsilon))
        run.median_norm.append((step, reading.median_norm))
        run.clipped_share.append((step, reading.clipped_share))
        run.accuracy.append((step, accuracy(average.model, images)))
        print(
            f"{line(step, epsilon, reading)}   loss {run.loss[-1][1]:.3f}   "
            f"test {run.accuracy[-1][1]:.1%}",
            flush=True,
        )

    for _ in range(args.epochs):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=args.physical, optimizer=optimizer
        ) as parts:
            for x_BCHW, y_B in parts:
                before = len(engine.accountant)
                y_R = y_B.repeat_interleave(args.views)
                item_R = item_of_row(len(y_B), args.views, y_B.device)
                optimizer.zero_grad()
                model.expect_samples(len(y_B))  # as many as were drawn: views are not counted
                output = model(views(x_BCHW, args.views, images.shift, images.flip), item=item_R)
                loss = criterion(output, y_R)
                (loss / args.views).backward()  # an image's loss: the mean over its views
                losses.append(loss.loss_per_sample.detach())
                statistics.note_backward()
                optimizer.step()
                step = len(engine.accountant)
                if step > before:  # the last part of a batch
                    average.update(plain)
                    if step % args.every == 0 or step == total:
                        look(step)
    run.seconds = time.perf_counter() - began
    run.last_accuracy = accuracy(plain, images)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        torch.save(average.model.state_dict(), args.output)
    return run


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """Share of test images that are classified rightly, without changes."""
    parts = zip(images.test_x.split(1000), images.test_y.split(1000), strict=True)
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in parts)
    return right / len(images.test_y)


#: What differs between the two; for CIFAR-10 it is the recipe's.
DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {
        "depth": 10,
        "width": 1,
        "stem": 8,
        "groups": 4,
        "views": 4,
        "batch_size": 480,
        "physical": 120,
        "epochs": 20,
        "lr": 2.0,
        "epsilon": 3.0,
    },
    "cifar10": {
        "depth": 16,
        "width": 4,
        "stem": 16,
        "groups": 16,
        "views": 16,
        "batch_size": 4096,
        "physical": 64,
        "epochs": 150,
        "lr": 2.0,
        "epsilon": 8.0,
    },
}


def subject() -> tuple[nn.Module, Tensor]:
    """The small network and a few images, for `flash-clipping check`."""
    torch.manual_seed(0)
    return WideResNet(1, depth=10, width=1, groups=4, stem=8), digits("cpu")[1][:5]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data", choices=tuple(DEFAULTS), default="digits", help="(%(default)s)")
    add("--root", default="data", help="folder of CIFAR-10, as torchvision has it (%(default)s)")
    add("--download", action="store_true", help="let torchvision fetch CIFAR-10 into --root")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--depth", type=int, help="of the Wide ResNet (10; 16 for CIFAR-10)")
    add("--width", type=int, help="(1; 4)")
    add("--stem", type=int, help="channels of the first convolution (8; 16)")
    add("--groups", type=int, help="of GroupNorm (4; 16)")
    add("--views", type=int, help="of an image, K (4; 16)")
    add("--batch-size", type=int, help="expected images of a batch (480; 4096)")
    add("--physical", type=int, help="at most so many images on the device at a time (120; 64)")
    add("--epochs", type=int, help="passes over the data, in expectation (20; 150)")
    add("--lr", type=float, help="learning rate of SGD (2)")
    add("--ema", type=float, default=0.9999, help="decay of averaged weights (%(default)s)")
    add("--epsilon", type=float, help="privacy budget of the run (3; 8)")
    add("--delta", type=float, default=1e-5, help="δ of the (ε, δ) guarantee (%(default)s)")
    add("--max-grad-norm", type=float, default=1.0, help="clipping bound C (%(default)s)")
    add("--every", type=int, default=10, help="steps from line to line (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--threads", type=int, default=1, help="of PyTorch on a CPU (%(default)s)")
    add("--plot", type=Path, help="where to draw the run, such as runs/images.svg")
    add("--output", type=Path, help="where to write the averaged weights")
    args = parser.parse_args(argv)
    for name, value in DEFAULTS[args.data].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if min(args.views, args.every) < 1:
        parser.error("--views and --every must be at least 1.")
    return args


def main(argv: Sequence[str] | None = None) -> Run:
    args = parse(argv)
    # A real release turns secure_mode on; here runs are to be repeatable.
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Optimal order is the")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    images = load(args)
    channels = images.test_x.shape[1]
    plain = WideResNet(channels, args.depth, args.width, args.groups, args.stem).to(args.device)
    run = train(args, images, plain)
    found = f"ε = {run.epsilon[-1][1]:.2f} at δ = {args.delta:g} (add or remove one image)"
    print(
        f"{found}; test accuracy {run.accuracy[-1][1]:.1%} of averaged weights, "
        f"{run.last_accuracy:.1%} of the last; {run.seconds:.0f} s"
    )
    if args.plot:
        curves = Curves(
            title=f"{args.data}: WRN-{args.depth}-{args.width}, {args.views} views, {found}",
            metric_name="test accuracy",
            bound=args.max_grad_norm,
            loss=run.loss,
            metric=run.accuracy,
            epsilon=run.epsilon,
            median_norm=run.median_norm,
            clipped_share=run.clipped_share,
        )
        draw(curves, args.plot)
    return run


if __name__ == "__main__":
    main()
