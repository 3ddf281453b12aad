"""What the installed ``opacus.tests`` need before they can test this library's classes.

Opacus' test modules name the classes under test in their own globals. :func:`opacus_tests` imports
such a module and puts ours there; Opacus itself is left alone. Nothing is copied: the test cases
that run are the installed ones.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor, nn

from flash_clipping import (
    FlashPrivacyEngine,
    GradSampleHooksFlashClipping,
    SeededNoiseWarning,
)

#: Opacus asks Hypothesis for its default of 100 examples per test; CI has seconds for each. The
#: environment variable multiplies the figures below.
EXAMPLES = float(os.environ.get("OPACUS_SUITE_EXAMPLES", "1"))


def opacus_tests(name: str, *, examples: int = 4, **replacements: Any) -> types.ModuleType:
    """The module ``opacus.tests.<name>``, with some of its globals replaced.

    Raises:
        AttributeError: the module has no global of that name, so that nothing would be replaced.
    """
    before = settings.get_current_profile_name()
    # A test's settings are taken from the profile that is current when it is decorated.
    settings.register_profile(
        "opacus-suite",
        max_examples=max(1, round(examples * EXAMPLES)),
        deadline=None,
        derandomize=True,
        # One test of Opacus runs in several of our classes, which Hypothesis warns about.
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("opacus-suite")
    try:
        with torchvision_stand_in():
            module = importlib.import_module(f"opacus.tests.{name}")
    finally:
        settings.load_profile(before)
    for key, value in replacements.items():
        if not hasattr(module, key):
            raise AttributeError(f"opacus.tests.{name} has no {key} to replace")
        setattr(module, key, value)
    return module


def not_applicable(reason: str) -> Callable[..., None]:
    """Stands where a test of Opacus is not run. The reason is for a reviewer to accept."""

    @unittest.skip(reason)
    def skipped(self: unittest.TestCase) -> None: ...

    return skipped


def add_case(module: dict[str, Any], name: str, *bases: type) -> None:
    """Let a module's globals hold a test case with nothing of its own."""
    module[name] = type(name, bases, {"__module__": module["__name__"]})


class Engine(FlashPrivacyEngine):
    """``FlashPrivacyEngine`` for tests that ask for Opacus' other modes: always flash.

    Opacus returns the criterion in mode ``"ghost"`` only, and so does this; without it the tests
    call ``loss.backward()`` on a loss of their own. A generator of noise is a seed of the engine.
    """

    SEED: int | None = None

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs, seed=self.SEED)

    def make_private(self, *, grad_sample_mode: str = "hooks", **kwargs: Any) -> Any:
        if grad_sample_mode == "ghost":
            reduction = kwargs.get("loss_reduction", "mean")
            kwargs.setdefault("criterion", nn.CrossEntropyLoss(reduction=reduction))
        else:
            kwargs.pop("criterion", None)
        if (generator := kwargs.pop("noise_generator", None)) is not None:
            seed = generator.initial_seed()
            self.stream = FlashPrivacyEngine(secure_mode=self.secure_mode, seed=seed).stream
        made = super().make_private(**kwargs | {"grad_sample_mode": "flash"})
        assert isinstance(made[0], GradSampleHooksFlashClipping)
        return made


@contextlib.contextmanager
def seeded_noise(seed: int = 1) -> Iterator[None]:
    """For tests that seed PyTorch and then expect equal noise: here that needs the engine's own."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", SeededNoiseWarning)
        patch.setattr(Engine, "SEED", seed)
        yield


def seeded(case: type[unittest.TestCase], name: str, seed: int = 1) -> Callable[..., None]:
    """A test of Opacus that is run with :func:`seeded_noise`."""

    def run(self: unittest.TestCase) -> None:
        with seeded_noise(seed):
            getattr(case, name)(self)

    return run


# -- torchvision, as far as Opacus' tests import it -----------------------------------------------


class FakeData(torch.utils.data.Dataset):
    """Images of noise with random labels, the same for the same index."""

    def __init__(
        self,
        size: int = 1000,
        image_size: tuple[int, ...] = (3, 224, 224),
        num_classes: int = 10,
        transform: Callable[[Tensor], Tensor] | None = None,
    ):
        self.size = size
        self.image_size = image_size
        self.num_classes = num_classes
        self.transform = transform or (lambda image: image)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= self.size:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(self.image_size, generator=generator)
        label = int(torch.randint(0, self.num_classes, (), generator=generator))
        return self.transform(image), label


class Compose:
    def __init__(self, transforms: list[Callable[[Tensor], Tensor]]):
        self.transforms = transforms

    def __call__(self, image: Tensor) -> Tensor:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    def __call__(self, image: Tensor) -> Tensor:
        return image


class Normalize:
    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]):
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self.mean) / self.std


class ConvNetWithBatchNorm(nn.Module):
    """All that the tests want of an image model: that it has a BatchNorm and a classifier."""

    def __init__(self, **kwargs: Any):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


@contextlib.contextmanager
def torchvision_stand_in() -> Iterator[None]:
    """While Opacus' tests are imported, and only where torchvision is missing."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    parts = {
        "datasets": {"FakeData": FakeData},
        "transforms": {"Compose": Compose, "ToTensor": ToTensor, "Normalize": Normalize},
        "models": dict.fromkeys(
            ("mobilenet_v3_small", "resnet18", "densenet121"), ConvNetWithBatchNorm
        ),
    }
    package = types.ModuleType("torchvision")
    modules = {"torchvision": package}
    for name, contents in parts.items():
        part = types.ModuleType(f"torchvision.{name}")
        vars(part).update(contents)
        setattr(package, name, part)
        modules[part.__name__] = part
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
