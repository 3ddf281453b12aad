"""The search itself: how far one sample moves what is released, and where that is worst.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping, Kernels
from flash_clipping.engine.criterion import FlashLoss
from flash_clipping.factors import convolution
from flash_clipping.ops.error_bounds import ETA
from flash_clipping.ops.runtime import cost
from tests.certificate.attacks import LENGTHS, SHORT, Attack, draw, mutated
from tests.certificate.subjects import SUBJECTS, Sample, Subject

DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


__all__ = [
    "DTYPES",
    "LENGTHS",
    "SHORT",
    "SUBJECTS",
    "Attack",
    "Finding",
    "Release",
    "Setting",
    "allowed",
    "fitting",
    "forced",
    "measure",
    "neighbours",
    "released",
    "search",
    "varied",
]


@dataclass(frozen=True)
class Setting:
    """How the library runs.

    Attributes:
        algorithm: how norms of linear maps are taken; ``"auto"``: as the library chooses.
        reduction: of the loss over samples: ``"sum"``; ``"mean"``, by the library's criterion;
            ``"mean by hand"``, which rounds every gradient divided by the size of the batch.
        company: how many ordinary samples are in the batch beside the hostile one.
    """

    dtype: str = "fp32"
    algorithm: str = "auto"
    backend: str = "torch"
    device: str = "cpu"
    mode: str = "one_pass"
    clipping: str = "flat"
    reduction: str = "sum"
    company: int = 0
    autocast: bool = False


@dataclass(frozen=True)
class Finding:
    """How far one sample of a batch moved the released sum, in units of the bound.

    Attributes:
        own: the change when the hostile sample is removed.
        other: the largest change when an ordinary sample is removed while the hostile one stays;
            0 where it is alone.
    """

    own: float
    other: float
    subject: str
    attack: Attack
    setting: Setting

    @property
    def allowed(self) -> float:
        return allowed(self.setting)

    def __str__(self) -> str:
        return (
            f"{self.subject}: removing the hostile sample {self.own:.7g} C, another "
            f"{self.other:.7g} C, with {self.attack}, {self.setting}"
        )


def allowed(setting: Setting) -> float:
    """What is promised, in units of the bound, in a batch of up to 2¹⁴ samples; in fp64 far less is
    lost."""
    return 1 + (1e-9 if setting.dtype == "fp64" else ETA)


def released(model: nn.Module) -> Tensor:
    """The sums that noise is added to, of all parameters, end to end in float64.

    The one place that knows where the optimizer reads them.
    """
    sums = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(grad is not None for grad in sums), "a parameter received no sum"
    return torch.cat([grad.detach().double().flatten() for grad in sums if grad is not None])


@contextmanager
def forced(algorithm: str) -> Iterator[None]:
    """Have the norms of all linear maps taken in one way, wherever that way is possible."""
    if algorithm == "auto":
        yield
        return

    def choose_on(
        device_type: str, B: int, T: int, d: int, p: int, itemsize: int, **options: Any
    ) -> str:
        if T == 1:
            return "rank_one"
        if algorithm == "outer_store":
            return "outer_store" if options["may_store"] else "outer"
        return "gram" if algorithm == "rank_one" else algorithm

    before = cost.choose_on, cost.STORE_BUDGET
    cost.choose_on = choose_on  # type: ignore[assignment]
    cost.STORE_BUDGET = math.inf if algorithm == "outer_store" else before[1]
    convolution.fits.cache_clear()
    try:
        yield
    finally:
        cost.choose_on, cost.STORE_BUDGET = before
        convolution.fits.cache_clear()


class Release:
    """Backward passes of one model under one setting."""

    def __init__(self, subject: Subject, attack: Attack, setting: Setting):
        torch.manual_seed(attack.seed)
        self.setting = setting
        self.reduction = "sum" if setting.reduction == "sum" else "mean"
        self.model = subject.make(attack).to(setting.device, DTYPES[setting.dtype])
        self.trainable = [p for p in self.model.parameters() if p.requires_grad]
        bound: Any = attack.bound
        if setting.clipping == "per_layer":
            bound = [attack.bound / len(self.trainable) ** 0.5] * len(self.trainable)
        self.module = GradSampleModuleFlashClipping(
            self.model,
            max_grad_norm=bound,
            loss_reduction=self.reduction,
            kernels=Kernels(setting.backend),
            mode=setting.mode,
            clipping=setting.clipping,
            strict=False,
            **subject.options,
        )
        optimizer = SimpleNamespace(loss_reduction=self.reduction, zero_grad=self.model.zero_grad)
        self.criterion: Any = FlashLoss(
            self.module, optimizer, PlantedLoss(self.reduction), self.reduction
        )

    def __call__(self, samples: list[Sample]) -> Tensor:
        """The released sums for a batch of these samples; zeros for none."""
        if not samples:
            return torch.zeros(
                sum(p.numel() for p in self.trainable),
                dtype=torch.float64,
                device=self.setting.device,
            )
        inputs, plants = (
            [torch.stack(of_all).to(self.setting.device) for of_all in zip(*part, strict=True)]
            for part in zip(*samples, strict=True)
        )
        self.model.zero_grad(set_to_none=True)
        kind = torch.device(self.setting.device).type
        with torch.autocast(kind, torch.bfloat16, enabled=self.setting.autocast):
            outputs = self.module(*inputs)
            outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
            if self.setting.reduction == "mean":
                loss = self.criterion(outputs, plants)
            else:
                loss_B = planted_losses(outputs, plants)
                loss = loss_B.sum() if self.reduction == "sum" else loss_B.mean()
        loss.backward()
        return released(self.model)


class PlantedLoss(nn.Module):
    """The loss of a sample whose gradients are planted, as a criterion."""

    def __init__(self, reduction: str):
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: Sequence[Tensor], plants: Sequence[Tensor]) -> Tensor:
        loss_B = planted_losses(outputs, plants)
        return loss_B if self.reduction == "none" else loss_B.mean()


def planted_losses(outputs: Sequence[Tensor], plants: Sequence[Tensor]) -> Tensor:
    """``[B]``: the gradient of every output is what is planted for it."""
    pairs = zip(outputs, plants, strict=True)
    return torch.stack([(output * plant).flatten(1).sum(1) for output, plant in pairs]).sum(0)


def batch_of(name: str, attack: Attack, setting: Setting) -> list[Sample]:
    """The hostile sample and its company."""
    subject, dtype = SUBJECTS[name], DTYPES[setting.dtype]
    everyone = [attack, *(attack.neighbour(attack.seed + 1 + i) for i in range(setting.company))]
    return [subject.sample(one, dtype) for one in everyone]


def measure(name: str, attack: Attack, setting: Setting) -> Finding:
    """Remove each sample of the batch in turn."""
    samples = batch_of(name, attack, setting)
    with forced(setting.algorithm), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        release = Release(SUBJECTS[name], attack, setting)
        # The first batch shows who is a sample. A hostile one may show nothing: where numbers are
        # all rounding they differ from batch to batch, and the model is refused.
        release([SUBJECTS[name].sample(attack.neighbour(attack.seed - 1), DTYPES[setting.dtype])])
        everything = release(samples)
        changes = [
            (everything - release(samples[:b] + samples[b + 1 :])).norm().item() / attack.bound
            for b in range(len(samples))
        ]
    # What is not finite moved everything.
    own, *others = (math.inf if math.isnan(change) else change for change in changes)
    return Finding(own, max(others, default=0.0), name, attack, setting)


def fitting(name: str, attack: Attack, rng: random.Random) -> Attack:
    """The attack at a length that its subject can have."""
    lengths = SUBJECTS[name].lengths
    if lengths is None:
        # One position takes its own algorithm, whatever is forced.
        return replace(attack, T=max(2, attack.T))
    return attack if attack.T in lengths else replace(attack, T=rng.choice(lengths))


def varied(setting: Setting, rng: random.Random) -> Setting:
    """The same dtype, algorithm and backend in another mode, clipping, reduction or batch."""
    return replace(
        setting,
        mode="two_pass" if rng.random() < 0.15 else "one_pass",
        clipping=rng.choices(("flat", "per_layer", "automatic"), (8, 1, 1))[0],
        reduction=rng.choice(("sum", "mean")),
        company=rng.choices((0, 1, 3), (6, 3, 1))[0],
    )


def search(
    name: str,
    setting: Setting,
    *,
    tries: int,
    climbs: int = 0,
    seed: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
) -> list[Finding]:
    """Random attacks, then mutations of the worst; all findings, worst first."""
    rng = random.Random(f"{seed} {name} {setting}")
    findings = []
    for _ in range(tries):
        attack = fitting(name, draw(rng, lengths=lengths), rng)
        findings.append(measure(name, attack, varied(setting, rng)))
    findings.sort(key=_badness, reverse=True)
    for _ in range(climbs):
        start = findings[min(rng.randrange(4), len(findings) - 1)]
        attack = mutated(start.attack, rng)
        attack = fitting(name, replace(attack, T=min(attack.T, max(lengths))), rng)
        findings.append(measure(name, attack, start.setting))
        findings.sort(key=_badness, reverse=True)
    return findings


def _badness(finding: Finding) -> float:
    return finding.own - finding.allowed


def neighbours(
    name: str,
    setting: Setting,
    *,
    tries: int,
    seed: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
) -> list[Finding]:
    """Hostile samples beside two ordinary ones, with the reduction as it is; the one that disturbs
    the sum of the others most comes first."""
    rng = random.Random(f"{seed} {name} {setting.dtype}")  # the same for all reductions
    findings = []
    for _ in range(tries):
        attack = fitting(name, draw(rng, lengths=lengths), rng)
        findings.append(measure(name, attack, replace(setting, company=2)))
    return sorted(findings, key=lambda finding: finding.other, reverse=True)
