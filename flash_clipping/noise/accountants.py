"""The cost of steps that Opacus' accountants do not know.

``dp-accounting`` is an extra (``flash-clipping[accounting]``); it is imported when an accountant of
privacy loss distributions is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from opacus.accountants import IAccountant, RDPAccountant, register_accountant

from flash_clipping.engine.accounting import (
    CountsSteps,
    Mechanism,
    StepsOfRdpAccountant,
    process_of,
    without_hints,
)
from flash_clipping.engine.adaptive import AdaptiveBound
from flash_clipping.errors import FlashClippingError, InvalidValue
from flash_clipping.noise.correlated import CorrelatedNoise
from flash_clipping.noise.mechanisms import IndependentNoise
from flash_clipping.noise.process import OrderedSampler, PoissonSampling
from flash_clipping.noise.releases import Release, dp_accounting, epsilon_by_pld


class DiscreteGaussianAccountant(StepsOfRdpAccountant):
    """Rényi DP of discrete Gaussian noise, ``FlashPrivacyEngine(accountant="discrete_gaussian")``.

    At whole orders Opacus' formula for Poisson-sampled Gaussian noise holds as it is for noise
    ``N`` on all integers, with the same standard deviation, and a sensitivity ``v`` in integers:

    * ``E_N[(p(x - v) / p(x))^l] = exp(l (l - 1) |v|^2 / (2 S^2))``, equal to the Gaussian's, for
      ``l v`` is a vector of integers, and sums over all integers do not change when they are moved
      by it (Canonne, Kamath and Steinke 2020, arXiv 2004.00010, proposition 5). The moments of the
      sampled mechanism are sums of these with binomial weights.
    * The other direction costs no more: ``x -> v - x`` swaps the two distributions (Mironov et al.
      2019, arXiv 1908.10530, theorem 5).

    At other orders, and for the distribution of the privacy loss in many dimensions, nothing of the
    kind is known. For Gaussian noise it holds as well, as ``"rdp"`` at whole orders.
    """

    DEFAULT_ALPHAS: list[float] = [*range(2, 65), *range(72, 257, 8), 320, 512]

    def get_privacy_spent(
        self, *, delta: float, alphas: list[float | int] | None = None
    ) -> tuple[float, float]:
        """As in Opacus; ``ValueError`` for orders that are not whole, or below 2."""
        if wrong := [alpha for alpha in alphas or () if alpha < 2 or alpha != int(alpha)]:
            raise InvalidValue(
                f"FC563 alphas: found {wrong}; expected whole orders, 2 or more: at others "
                "discrete noise is not accounted for."
            )
        if any(multiplier == 0 for multiplier, _, _ in self.history):
            return math.inf, math.nan
        with without_hints():
            found, order = super().get_privacy_spent(delta=delta, alphas=alphas)
        return max(0.0, float(found)), float(order)

    @classmethod
    def mechanism(cls) -> str:
        return "discrete_gaussian"


class PldAccountant(CountsSteps, IAccountant):
    """Privacy loss distributions of dp-accounting's, ``FlashPrivacyEngine(accountant="pld")``.

    Needed where batches have a fixed size or noise is correlated; it takes ordinary Poisson
    sampling as well. Values are upper bounds on ε, up to dp-accounting's numerics.

    Attributes:
        process: how batches are drawn and noise is made; set by ``make_private``.
        history: (noise multiplier, sample rate, steps in a row).

    Raises:
        ImportError: ``dp-accounting`` is not installed.
    """

    def __init__(self) -> None:
        dp_accounting()  # said now, not when training has ended
        super().__init__()  # type: ignore[no-untyped-call]
        self.process: Mechanism = PoissonSampling()
        #: Whether the next step begins with noise that knows nothing of the steps before.
        self._begins = True
        #: Whether ``make_private`` has made a model private for this process.
        self.is_used = False
        #: Called where that is so after a checkpoint was loaded.
        self.before_run: Callable[[], None] | None = None

    def follow(self, process: Mechanism) -> None:
        """Account for this process from now on; ``ValueError`` after steps of another one."""
        is_another = bool(self.history) and process != self.process
        if is_another or (self.is_used and not (process.is_plain and self.process.is_plain)):
            raise InvalidValue(
                f"FC562 accountant: this engine accounts for {self.process.state_dict()}, and is "
                f"now asked to for {process.state_dict()}. Steps of two models, or of two runs, "
                "cannot be told apart here. Use a new engine for each."
            )
        self.process, self._begins, self.before_run = process, True, None

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        *kind, steps = self.history[-1] if self.history else (None, None, 0)
        of_round = steps % self.process.round_steps
        if self._begins and self.process.is_in_order:
            self.history.append((noise_multiplier, sample_rate, 0))
        elif of_round and kind != [noise_multiplier, sample_rate]:
            raise FlashClippingError(
                f"FC522 optimizer.step(): found noise_multiplier={noise_multiplier} in step "
                f"{of_round} of a round of {self.process.round_steps}, whose steps before had "
                f"{kind[0]}; expected one for all steps of a round of {self.process}. Change it "
                "when a round ends."
            )
        now: Any = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate}
        RDPAccountant.step(self, **now)  # type: ignore[arg-type]  # steps alike are one entry
        self._begins = False

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """ε for this δ, for datasets that are neighbours by :attr:`Mechanism.relation`."""
        return epsilon_by_pld(releases_of(self), delta)

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """As Opacus', for steps of one batch each, unless these are ordinary Poisson batches."""
        account = super().get_optimizer_hook_fn(sample_rate)

        def hook(optimizer: Any) -> None:
            if optimizer.accumulated_iterations != 1 and not self.process.is_plain:
                raise FlashClippingError(
                    f"FC512 optimizer.step(): found a step of {optimizer.accumulated_iterations} "
                    "batches; expected one, for which steps are accounted. Nothing was released. "
                    "Use a larger batch size."
                )
            account(optimizer)

        return hook

    def state_dict(self, destination: Any = None) -> Any:
        destination = super().state_dict(destination)
        destination["process"] = self.process.state_dict()
        return destination

    def load_state_dict(self, state_dict: Any) -> None:
        """As Opacus'; noise of the steps before is not known any more, and accounted for by
        itself. ``ValueError`` for steps of another process."""
        now, then = self.process.state_dict(), state_dict.get("process")
        if then is not None and then != now:
            raise InvalidValue(
                f"FC562 accountant: the checkpoint accounts for {then}; this engine for {now}. "
                "Make the model private as it was, and load the checkpoint then."
            )
        super().load_state_dict(state_dict)
        self._begins = True
        if self.before_run is not None:
            self.before_run()

    @classmethod
    def mechanism(cls) -> str:
        return "pld"


def releases_of(accountant: IAccountant) -> tuple[Release, ...]:
    """What all steps released."""
    return tuple([process_of(accountant).releases(*entry) for entry in accountant.history])


def requested_process(accountant: IAccountant, given: dict[str, Any]) -> Mechanism:
    """The mechanism that ``make_private`` was given, for its dataset; the accountant is told.

    ``ValueError`` if other arguments do not go with it, or the accountant does not know it.
    """
    mechanism: Mechanism = given.get("mechanism") or PoissonSampling()
    needed, advice = "discrete_gaussian" if mechanism.noise_grid == "exact" else "pld", {}
    if needed != "pld" or not mechanism.is_plain:
        if isinstance(given.get("clipping"), AdaptiveBound):
            advice["clipping=AdaptiveBound()"] = "The bound moves, by a count with continuous noise"
        if not given.get("poisson_sampling", True):
            advice["poisson_sampling=False"] = "The engine must draw the batches"
        if accountant.mechanism() != needed:
            advice[f"accountant={accountant.mechanism()!r}"] = (
                f"Its formulas do not cover it. Use FlashPrivacyEngine(accountant={needed!r})"
            )
    for found, instead in advice.items():
        raise InvalidValue(f"FC316 make_private: found {mechanism} with {found}. {instead}.")
    if not mechanism.is_plain:
        loader = given["data_loader"]
        mechanism = mechanism.on(len(loader.dataset), len(loader), given.get("unit"))
    if isinstance(accountant, PldAccountant):
        accountant.follow(mechanism)
    return mechanism


def begin(mechanism: Mechanism, accountant: Any, optimizer: Any, sampler: Any) -> None:
    """Let a private optimizer make the noise of this mechanism, and the accountant know that it is
    used: after a checkpoint was loaded, noise and rounds of the sampler begin again."""
    begins_anew = sampler.begin_run if isinstance(sampler, OrderedSampler) else None
    noise = getattr(mechanism, "noise", IndependentNoise())
    if not isinstance(noise, IndependentNoise):
        optimizer.correlated = CorrelatedNoise(noise, sampler.check_step)
        begins_anew = optimizer.correlated.begin_run
    if isinstance(accountant, PldAccountant):
        accountant.is_used, accountant.before_run = True, begins_anew


for accountant in (PldAccountant, DiscreteGaussianAccountant):
    register_accountant(accountant.mechanism(), accountant, force=True)
