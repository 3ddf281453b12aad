"""Arguments that are lists with an entry for each sample: cut with the batch where it is looked at
who is a sample."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.errors import raises
from tests.support.oracle import assert_close

B = 4


def boxes(*counts: int) -> list[dict[str, Tensor]]:
    return [
        {"boxes": torch.randn(n, 4, dtype=torch.float64), "labels": torch.randint(0, 5, (n,))}
        for n in counts
    ]


class Detector(nn.Module):
    """``model(images, targets)``, as torchvision's detectors are called: a loss of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, images: Any, targets: Any) -> Tensor:
        if not isinstance(images, Tensor):
            images = torch.stack(list(images))
        scores = self.head(self.features(images).tanh().mean((2, 3)))
        found = [
            (row - target["boxes"].sum(0)[:1]).square().sum() + row[target["labels"]].sum()
            for row, target in zip(scores, targets, strict=True)
        ]
        return torch.stack(found)


class Padded(nn.Module):
    """A list of one tensor ``[T_b, 3]`` a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, rows: list[Tensor]) -> Tensor:
        lengths = torch.tensor([len(x) for x in rows])
        x = self.first(pad_sequence(rows, batch_first=True)).tanh()
        counts = torch.arange(x.shape[1]) < lengths[:, None]
        found: Tensor = self.head((x * counts[..., None]).sum(1)).square().sum(1)
        return found


class Spoken(Padded):
    """Lengths as a list of numbers, and a text for each sample."""

    def forward(self, x: Tensor, lengths: list[int], texts: list[str]) -> Tensor:  # type: ignore[override]
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        assert len(texts) == len(x) and packed.batch_sizes[0] == len(x)
        counts = torch.arange(x.shape[1]) < torch.tensor(lengths)[:, None]
        said = torch.tensor([float(len(text)) for text in texts], dtype=x.dtype)
        h = (self.first(x).tanh() * counts[..., None]).sum(1) * said[:, None]
        found: Tensor = self.head(h).square().sum(1)
        return found


def check(model: nn.Module, *arguments: Any, mode: str = "one_pass") -> None:
    """Norms are those of a plain model that sees one sample at a time; arguments have an entry, or
    a row, for each."""
    plain, norms = copy.deepcopy(model), []
    for b in range(B):
        one = [x[b : b + 1] for x in arguments]
        grads = torch.autograd.grad(plain(*one).sum(), [*plain.parameters()])
        norms.append(torch.stack([g.norm() for g in grads]).norm())
    flash: Any = GradSampleModuleFlashClipping(model, mode=mode)
    for _ in range(2):
        flash(*arguments).mean().backward()
        assert_close(flash.get_norm_sample(), torch.stack(norms), 1e-9)
        flash.zero_grad()


@pytest.mark.parametrize("counts", [(1, 2, 3, 2), (B, B, B, B)])
@pytest.mark.parametrize("kind", [list, tuple])
def test_targets_of_a_detector_beside_images(kind: Any, counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    images = torch.randn(B, 3, 6, 6, dtype=torch.float64)
    check(Detector().double(), images, kind(boxes(*counts)), mode="two_pass")
    check(Detector().double(), list(images), kind(boxes(*counts)))


def test_one_tensor_a_sample_lengths_and_texts() -> None:
    torch.manual_seed(0)
    rows = [torch.randn(n, 3, dtype=torch.float64) for n in (2, 4, 3, 1)]
    check(Padded().double(), rows)
    x = pad_sequence(rows, batch_first=True)
    check(Spoken().double(), x, [2, 4, 3, 1], ["a", "list", "of", "texts"])


class Graphs:
    """A batch of graphs as ``torch_geometric`` has it: an object that can be called."""

    num_graphs = 3

    def __init__(self, **held: Tensor) -> None:
        self.__dict__.update(held)

    def __call__(self, *names: str) -> Any:
        return iter(names)


def test_graphs_are_refused_by_name() -> None:
    class Net(nn.Linear):
        def forward(self, graphs: Any) -> Any:
            return super().forward(graphs.x)

    flash: Any = GradSampleModuleFlashClipping(Net(3, 2))
    graphs = Graphs(x=torch.randn(9, 3))
    with raises("FC207", match="Graphs"):
        flash(graphs)
    with torch.no_grad():
        assert flash(graphs).shape == (9, 2)
