"""The images example: views of an image are one sample, and a short run."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.errors import raises

ROOT = Path(__file__).parents[2]


@pytest.fixture
def name() -> str:
    return "images"


B, K = 3, 2


def test_views_are_of_their_own_image(example: ModuleType) -> None:
    """Row b·K + k is image b, moved by at most a pixel in either direction, perhaps mirrored."""
    torch.manual_seed(0)
    images = torch.arange(3.0 * 2 * 4 * 5).view(3, 2, 4, 5)
    seen = set()
    for number, view in enumerate(example.views(images, 40, 1, True)):
        padded = F.pad(images[number // 40][None], (1, 1, 1, 1), mode="reflect")[0]
        found = [
            (dy, dx, flipped)
            for dy in range(3)
            for dx in range(3)
            for flipped, shown in ((False, view), (True, view.flip(2)))
            if torch.equal(padded[:, dy : dy + 4, dx : dx + 5], shown)
        ]
        assert found, number
        seen.update(found)
    assert len(seen) == 18
    assert torch.equal(example.views(images, 1, 0, False), images)
    assert example.views(images[:0], 3, 1, True).shape == (0, 2, 4, 5)


@pytest.fixture
def six_images(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    train, x, y = example.digits("cpu")
    train.tensors = tuple(tensor[:6] for tensor in train.tensors)
    monkeypatch.setattr(example, "digits", lambda device: (train, x[:9], y[:9]))
    return example


SHORT = [
    "--device=cpu",
    "--stem=2",
    "--groups=1",
    "--views=2",
    "--batch-size=2",
    "--every=2",
    "--epochs=2",
]


def test_short_run_counts_parts_of_a_batch_as_one_step(
    six_images: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts of a batch are one step, and so is a batch without images."""
    plainly, parts = six_images.views, []

    def views(x_BCHW: Tensor, *settings: Any) -> Tensor:
        parts.append(len(x_BCHW))
        return plainly(x_BCHW, *settings)

    updates = []
    monkeypatch.setattr(six_images, "views", views)
    monkeypatch.setattr(six_images.Average, "update", lambda self, model: updates.append(model))
    files = ["--plot=plot.svg", "--output=weights.pt"]
    run = six_images.main([*SHORT, *files, "--physical=1", "--seed=6", "--lr=0.1"])
    assert set(parts) == {1} and len(parts) > len(updates) == 6
    assert [step for step, _ in run.epsilon] == [2, 4, 6]
    assert 2.8 < run.epsilon[-1][1] <= 3
    assert len(run.loss) == len(run.accuracy) == len(run.median_norm) == 3
    assert 0 < run.clipped_share[-1][1] <= 1
    printed = capsys.readouterr().out
    assert printed.startswith("step 2   ε = ") and "samples/s" in printed
    picture = Path("plot.svg").read_text(encoding="utf-8")
    for words in ("training loss", "test accuracy", "ε", "median gradient norm", "clipped samples"):
        assert words in picture
    assert len(picture) < 60_000
    assert all(torch.isfinite(param).all() for param in updates[-1].parameters())
    updates[-1].load_state_dict(torch.load("weights.pt"))


def test_views_without_their_image_are_refused(
    six_images: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views that were clipped one by one would move the sum by K times the bound."""
    monkeypatch.setattr("opacus.privacy_engine.get_noise_multiplier", lambda **settings: 1.0)
    monkeypatch.setattr(six_images, "item_of_row", lambda items, k, device: torch.arange(items * k))
    with raises("FC272", match=r"unit=Documents\('item'\)"):
        six_images.main(SHORT)


def test_the_page_shows_the_example(example: ModuleType) -> None:
    """Every line of Python on the tutorials' pages is one of the script."""
    for page, script in (("images", "images.py"), ("language-model", "training.py")):
        text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text(encoding="utf-8")
        source = (ROOT / "examples" / script).read_text(encoding="utf-8")
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        assert blocks and all(block in source for block in blocks)
