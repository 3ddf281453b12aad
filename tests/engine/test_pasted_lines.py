"""Refusals end in a line that can be pasted: with it the model trains."""

from __future__ import annotations

import copy
import re
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proxies import UnsupportedUse
from flash_clipping.layers import MixtureOfExperts, RoutedExperts, TopKRouter

D = 6


class Around(nn.Module):
    """What is refused, between a layer and a head that are not."""

    def __init__(self, middle: nn.Module, ids: bool = False):
        super().__init__()
        self.ids = ids
        self.first, self.middle, self.head = nn.Linear(D, D), middle, nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(x.long()) if self.ids else self.middle(self.first(x))
        if isinstance(h, tuple):
            h = h[0]
        if h.is_complex():
            h = h.real
        return self.head(h.flatten(1)[:, :D])


class Rounds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (16 * x).round() / 16


class Scales(nn.Module):
    """A parameter of its own, used in a way that ``use`` says."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype | None = None):
        super().__init__()
        self.use, self.gain = use, nn.Parameter(torch.ones(D, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.gain)


class Chosen(nn.Module):
    """Experts that get the rows of any samples."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.self_attn = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.self_attn(x)
        first = (999 * x.flatten(0, 1)[:, 0]).sin() > 0
        out = torch.zeros_like(x).flatten(0, 1)
        out[first] = self.experts[0](x.flatten(0, 1)[first])
        out[~first] = self.experts[1](x.flatten(0, 1)[~first])
        return out.view_as(x)


class Keeps(nn.Module):
    """A buffer that holds something of the samples, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.1)
        return x


def rounded_mixture() -> nn.Module:
    mixture = RoutedExperts(TopKRouter(D, 4, 2), MixtureOfExperts(D, 5, 4))
    nn.utils.parametrize.register_parametrization(mixture.experts, "down", Rounds())
    return mixture


def by_frequencies(x: Tensor, gain: Tensor) -> Tensor:
    ids = torch.zeros(x.shape[:2], dtype=torch.long)
    return x + F.embedding(ids, gain[None], scale_grad_by_freq=True)


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "scale_grad_by_freq": lambda: Around(nn.Embedding(9, D, scale_grad_by_freq=True), ids=True),
    "bag": lambda: Around(nn.EmbeddingBag(9, D, mode="max"), ids=True),
    "max_norm": lambda: Around(nn.Embedding(9, D, max_norm=1.0), ids=True),
    "instance norm": lambda: Around(nn.InstanceNorm1d(5, affine=True, track_running_stats=True)),
    "batch norm": lambda: Around(nn.BatchNorm1d(5)),
    "spectral norm": lambda: Around(nn.utils.spectral_norm(nn.Linear(D, D))),
    "complex": lambda: Around(Scales(torch.mul, torch.complex64)),
    "lazy": lambda: Around(nn.LazyLinear(D)),
    "recurrent": lambda: Around(nn.LSTM(D, D, batch_first=True)),
    "frequencies": lambda: Around(Scales(by_frequencies)),
    "experts": lambda: Around(Chosen()),
    "buffer": lambda: Around(Keeps()),
    "computed base": lambda: Around(rounded_mixture()),
}


def code_in(message: str) -> list[str]:
    """The code in a message, part by part: lines that stand together."""
    parts = re.findall(r"(?:^    .*(?:\n|$))+", message, re.MULTILINE)
    return [textwrap.dedent(part) for part in parts]


def step(model: nn.Module, x: Tensor, **options: Any) -> Any:
    flash = GradSampleModuleFlashClipping(model, **options)
    flash(x).square().sum(1).mean().backward()
    return flash.get_norm_sample()


#: Refusals that nothing serves but a mode: the last line keeps what is trained.
KEPT = {"frequencies", "experts", "complex", "bag", "computed base"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_with_the_line_it_says_the_model_trains(name: str) -> None:
    torch.manual_seed(0)
    model = REFUSED[name]()
    x = torch.rand(4, 5, D)
    if "ids" in vars(model) and model.ids:
        x = torch.randint(0, 9, (4, 5)).float()
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)) as error:
        step(model, x)
    *said, line = str(error.value).splitlines()
    assert line.startswith("    ") and said, str(error.value)
    if name == "experts":
        assert "folded_modules" not in str(error.value)
    assert (line.strip() == 'mode="one_by_one"') == (name in KEPT), line
    is_wrapped = hasattr(model, "autograd_grad_sample_hooks")
    for code in code_in(str(error.value)):
        if is_wrapped:
            model = REFUSED[name]()
        names: dict[str, Any] = {"model": copy.deepcopy(model), "torch": torch, "x": x}
        exec(code, names)
        options = {"mode": names["mode"]} if "mode" in names else {}
        norms = step(names["model"], x, **options)
        assert norms.shape == (4,) and norms.isfinite().all()


def test_an_unsupported_use_offers_the_exact_mode() -> None:
    tap: Any = SimpleNamespace(path="middle (Scales)")
    assert code_in(str(UnsupportedUse(tap, "by hand"))) == ['mode="one_by_one"']
