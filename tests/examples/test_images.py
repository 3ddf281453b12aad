"""The images example: views of an image are one sample, and a short run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import Documents, GradSampleModuleFlashClipping
from tests.support.errors import raises
from tests.support.oracle import assert_close

ROOT = Path(__file__).parents[2]


@pytest.fixture
def name() -> str:
    return "images"


def small(images: ModuleType, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return images.WideResNet(2, depth=10, width=2, groups=2, stem=4, classes=3).to(dtype)


B, K = 3, 2


def batch(example: ModuleType, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Views `[B·K, 2, 6, 5]` and labels `[B]`."""
    torch.manual_seed(1)
    return example.views(torch.randn(B, 2, 6, 5, dtype=dtype), K, 1, True), torch.arange(B)


@pytest.mark.parametrize(
    ("mode", "dtype", "tolerance"),
    [
        ("one_pass", torch.float64, 1e-9),
        ("two_pass", torch.float64, 1e-9),
        ("one_pass", torch.float32, 1e-5),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_image_at_a_time(
    example: ModuleType, mode: str, dtype: torch.dtype, tolerance: float
) -> None:
    x_R, y_B = batch(example, dtype)
    plain = small(example, torch.float64)
    rows: list[list[Tensor]] = []
    for views, label in zip(x_R.double().split(K), y_B, strict=True):
        loss = F.cross_entropy(plain(views), label.expand(K))  # the mean over views
        rows.append(list(torch.autograd.grad(loss, list(plain.parameters()))))
    norm_B = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in rows])
    bound = norm_B.median().item()

    model = small(example, dtype)
    private = GradSampleModuleFlashClipping(
        model, unit=Documents("item"), max_grad_norm=bound, mode=mode, loss_reduction="sum"
    )
    losses_R = F.cross_entropy(
        private(x_R, item=example.item_of_row(B, K, x_R.device)),
        y_B.repeat_interleave(K),
        reduction="none",
    )
    (losses_R.sum() / K).backward()
    assert_close(private.get_norm_sample(), norm_B, tolerance, "norms")
    coef_B = (bound / (norm_B + 1e-6)).clamp(max=1)
    assert (coef_B < 1).any() and not (coef_B < 0.999).all()
    for (path, param), *grads in zip(model.named_parameters(), *rows, strict=True):
        expected = sum(c * g for c, g in zip(coef_B, grads, strict=True))
        assert_close(param.grad, expected, tolerance, path)


def test_standardized_weights_have_mean_0_and_norm_1(example: ModuleType) -> None:
    weight = example.standardized(3 + 2 * torch.randn(4, 3, 5, 5, dtype=torch.float64))
    torch.testing.assert_close(weight.mean((1, 2, 3)), torch.zeros(4).double())
    torch.testing.assert_close(
        weight.square().sum((1, 2, 3)), torch.ones(4).double(), rtol=1e-4, atol=0
    )


def test_convolutions_use_standardized_weights(example: ModuleType) -> None:
    layer = example.convolution(2, 3, stride=2)
    x = torch.randn(2, 2, 6, 5)
    expected = F.conv2d(x, example.standardized(layer.weight), stride=2, padding=1)
    assert torch.equal(layer(x), expected)


def test_the_network_of_the_paper(example: ModuleType) -> None:
    network = example.WideResNet(3, depth=16, width=4, groups=16)
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 1 + 3 * 2 * 2 + 3  # and the shortcuts of three stages
    assert all(isinstance(m, example.StandardizedConv2d) for m in convolutions)
    assert 2.7e6 < sum(p.numel() for p in network.parameters()) < 2.8e6
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    with pytest.raises(ValueError, match="found depth=12; expected 10, 16"):
        example.WideResNet(3, depth=12, width=1, groups=1)


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


def test_average_forgets_early_weights(example: ModuleType) -> None:
    model = nn.Linear(1, 1, bias=False)
    average = example.Average(model, decay=0.3)
    expected = model.weight.item()
    for step in range(1, 6):
        nn.init.constant_(model.weight, step)
        average.update(model)
        kept = min(0.3, (1 + step) / (10 + step))
        expected = kept * expected + (1 - kept) * step
    assert average.model.weight.item() == pytest.approx(expected)


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


@pytest.mark.usefixtures("randomness_of_opacus")
def test_views_that_are_alike_change_nothing(
    six_images: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image's loss is the mean over its views: three of them are clipped and summed as one."""
    monkeypatch.setattr("opacus.privacy_engine.get_noise_multiplier", lambda **settings: 1.0)
    monkeypatch.setattr(six_images.FlashPrivacyEngine, "get_epsilon", lambda self, delta: 0.0)
    monkeypatch.setattr(six_images, "views", lambda x, k, shift, flip: x.repeat_interleave(k, 0))
    found = []
    for k in (1, 3):
        command = [*SHORT, f"--views={k}", "--output=weights.pt", "--max-grad-norm=3"]
        run = six_images.main([*command, "--seed=6", "--lr=0.1"])
        found.append((run, torch.load("weights.pt")))
    (one, of_one), (three, of_three) = found
    assert min(share for _, share in one.clipped_share) < 1
    assert dict(one.median_norm) == pytest.approx(dict(three.median_norm), rel=1e-4)
    assert dict(one.loss) == pytest.approx(dict(three.loss), rel=1e-4)
    torch.testing.assert_close(of_one, of_three, rtol=1e-4, atol=1e-5)


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


def test_cifar10_is_read_as_torchvision_has_it(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def dataset(root: str, train: bool, download: bool) -> SimpleNamespace:
        asked.append((root, train, download))
        if root == "nowhere":
            raise RuntimeError("Dataset not found or corrupted.")
        size = 5 if train else 3
        data = torch.full((size, 32, 32, 3), 255, dtype=torch.uint8)
        data[:, 0, 0, 2] = 0
        return SimpleNamespace(data=data.numpy(), targets=list(range(size)))

    monkeypatch.setitem(
        sys.modules,
        "torchvision.datasets",
        SimpleNamespace(CIFAR10=dataset),  # type: ignore
    )
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace())  # type: ignore
    cifar = example.load(example.parse(["--data=cifar10", "--device=cpu", "--root=here"]))
    assert asked == [("here", True, False), ("here", False, False)]
    assert len(cifar.train) == 5 and cifar.test_x.shape == (3, 3, 32, 32)
    assert cifar.test_x[0, 2, 0, 0] == -1 and cifar.test_x.sum() == 3 * (3 * 32 * 32 - 2)
    assert cifar.test_y.tolist() == [0, 1, 2] and cifar.flip and cifar.shift == 4
    with pytest.raises(SystemExit, match="not in nowhere .*--download"):
        example.load(example.parse(["--data=cifar10", "--root=nowhere"]))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(SystemExit, match="pip install torchvision"):
        example.load(example.parse(["--data=cifar10"]))
