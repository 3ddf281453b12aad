"""The cost of steps that Opacus' accountants do not know, by Google's dp-accounting.

A :class:`MechanismSpec` says how batches are drawn and how noise is made. Each pair of the two is a
:class:`~flash_clipping.engine.releases.Release`, or is refused by name. ``dp-accounting`` is an
extra (``flash-clipping[accounting]``); it is imported when such an accountant is made.
"""

from __future__ import annotations

import copy
import itertools
import math
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from opacus.accountants import (
    GaussianAccountant,
    IAccountant,
    PRVAccountant,
    RDPAccountant,
    register_accountant,
)
from opacus.accountants.analysis.prv import (
    Domain,
    PoissonSubsampledGaussianPRV,
    TruncatedPrivacyRandomVariable,
    compose_heterogeneous,
    discretize,
)
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from scipy.special import erfc
from torch import distributed as dist

from flash_clipping.engine.releases import Release, dp_accounting, epsilon_by_pld
from flash_clipping.errors import FlashClippingError, InvalidValue, check_one_of, checked_number
from flash_clipping.randomness.mechanisms import BandedNoise, IndependentNoise, NoiseMechanism

#: How batches are drawn, by the names that ``make_private(sampling=...)`` takes.
Sampling = Literal[
    "poisson", "fixed_order", "cyclic_poisson", "shuffled", "random_allocation", "poisson_rows"
]

#: The neighbouring relation of ε, in words.
ADD_OR_REMOVE = "add or remove one sample"
ZERO_OUT = "zero out one sample"

_MOST_NOISE = 1e6

#: Points of a privacy loss's distribution that are computed: a minute, and a few GB.
_MOST_POINTS = 2**25
#: The largest ε that is computed from them; ``exp(ε)`` overflows above 709.
_MOST_LOSS = 600.0
_SQRT_2 = np.sqrt(2)
#: Orders of Rényi DP, which cost little, for how far the distribution of a privacy loss reaches.
_WHOLE_ORDERS: list[float | int] = [*range(2, 64)]


@dataclass(frozen=True)
class MechanismSpec:
    """How batches are drawn, and how noise is made.

    Args:
        sampling: ``"poisson"``: every step draws every sample with the sample rate.
            ``"cyclic_poisson"``: samples are in as many groups as noise has diagonals, and a step
            draws from the next group only, with so many times the rate. ``"fixed_order"``: batches
            are parts of the dataset, the same in every epoch, in the same order. ``"shuffled"``:
            the same, but other parts in every epoch. ``"random_allocation"``: every sample takes
            part in ``participations`` steps of a round, chosen uniformly and for itself; a round
            has ``participations * cycle`` steps. ``"poisson_rows"``: every step draws every row of
            every unit with the sample rate.
        noise: how the noise of steps is correlated.
        samples: in the dataset.
        max_batch_size: of a Poisson batch with more samples a random subset of this size is taken;
            ``None``: all.
        cycle: steps from a group, or a batch, to its next turn.
        participations: of a sample in a round of random allocation.
        rows_per_unit: the most rows that a unit has; of ``"poisson_rows"`` alone.

    Raises:
        ValueError: the two do not go together.
    """

    sampling: str = "poisson"
    noise: NoiseMechanism = field(default_factory=IndependentNoise)
    samples: int = 0
    max_batch_size: int | None = None
    cycle: int = 1
    participations: int = 1
    rows_per_unit: int | None = None

    def __post_init__(self) -> None:
        check_one_of("sampling", self.sampling, get_args(Sampling))
        checked_number("participations", self.participations, "[1, inf)", example=1, whole=True)
        if self.participations > 1 and self.sampling != "random_allocation":
            raise InvalidValue(
                f"participations: found {self.participations} with sampling={self.sampling!r}; "
                "expected sampling='random_allocation'."
            )
        if (self.sampling == "poisson_rows") != (self.rows_per_unit is not None):
            raise InvalidValue(
                f"max_rows_per_unit: found {self.rows_per_unit} with sampling={self.sampling!r}; "
                "expected sampling='poisson_rows' and the most rows of a unit, by which epsilon is "
                "for all of them."
            )
        served = {"fixed_order": NoiseMechanism, "cyclic_poisson": BandedNoise}
        fits = isinstance(self.noise, served.get(self.sampling, IndependentNoise))
        found = f"{type(self.noise).__name__} with sampling={self.sampling!r}"
        if self.max_batch_size is not None:
            fits, found = fits and self.sampling == "poisson", f"max_batch_size with {found}"
        if not fits:
            raise InvalidValue(
                f"make_private: found {found}. A sample may take part in two steps whose noise "
                "partly cancels, and epsilon must know how often. It does for IndependentNoise "
                "with every sampling but 'cyclic_poisson' (max_batch_size: with 'poisson' alone), "
                "for BandedNoise with 'cyclic_poisson' or 'fixed_order' (it reaches over fewer "
                "steps than a cycle has), and for BandedInverseNoise, OneStepNoise and "
                "BufferedNoise with 'fixed_order' (they reach over all steps: no amplification of "
                "theirs is proven here)."
            )
        if isinstance(self.noise, BandedNoise) and self.noise.count > self.cycle:
            raise InvalidValue(
                f"make_private: found BandedNoise({self.noise.count}) with {self.cycle} batches in "
                "an epoch. Steps in which one sample takes part must be further apart than noise "
                "reaches. Use fewer diagonals, or smaller batches."
            )

    @property
    def is_plain(self) -> bool:
        """Whether Opacus' own accountants describe it."""
        return self == MechanismSpec(samples=self.samples)

    @property
    def is_in_order(self) -> bool:
        """Whether step t must take batch t."""
        return self.sampling not in ("poisson", "poisson_rows")

    @property
    def round_steps(self) -> int:
        """Steps whose batches are drawn together, all of one noise multiplier."""
        drawn_together = self.sampling in ("shuffled", "random_allocation")
        return self.participations * self.cycle if drawn_together else 1

    @property
    def relation(self) -> str:
        """The neighbouring relation of ε, in words."""
        if self.sampling == "poisson_rows":
            return f"add or remove one unit, of {self.rows_per_unit} rows at most"
        added = self.sampling in ("poisson", "random_allocation")
        return ADD_OR_REMOVE if added else ZERO_OUT

    def releases(self, noise_multiplier: float, sample_rate: float, steps: int) -> list[Release]:
        """What so many steps in a row release, as it is for each of the neighbours that there are;
        ε is the largest of them.

        ``noise_multiplier``: standard deviation of the independent noise ``Z``, in clipping bounds;
        ``sample_rate``: of one step, over the whole dataset.
        """
        noise = noise_multiplier
        if self.max_batch_size is not None:
            # For a neighbour with one sample less, and for one with one more.
            return [
                Release(noise, steps, "truncated", sample_rate, self.max_batch_size, samples)
                for samples in (self.samples, self.samples + 1)
            ]
        if self.sampling == "poisson_rows":
            assert self.rows_per_unit is not None  # see requested_process
            return [Release(noise, steps, "rows", sample_rate, self.rows_per_unit)]
        if self.sampling in ("fixed_order", "shuffled"):
            # Whatever the order is, a sample takes part once in every epoch: nothing is amplified.
            return [Release(noise / self.noise.sensitivity(steps, self.cycle))]
        if self.sampling == "random_allocation":
            # A round that has begun counts in full. k steps of a round are one step in each of k
            # parts of it, which are random and may be known (Feldman and Shenfeld 2025).
            times = -(-steps // self.round_steps) * self.participations
            return [Release(noise, times, "one_of", size=self.cycle)]
        rate, times = sample_rate, steps
        if self.sampling == "cyclic_poisson":
            # Columns of one sample's steps are orthogonal: each is a release of its own
            # (arXiv 2306.08153, theorem 4).
            rate, times = min(1.0, sample_rate * self.cycle), -(-steps // self.cycle)
        return [Release(noise / self.noise.sensitivity(steps), times, "poisson", rate)]

    def state_dict(self) -> dict[str, Any]:
        """Plain values, to compare with those of a checkpoint."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "noise"}
        return numbers | self.noise.settings


_Steps = list[tuple[float, float, int]]


def _count(history: Sequence[Sequence[Any]]) -> int:
    return sum(steps for _, _, steps in history)


class CountsSteps:
    """An accountant whose ``len`` is the number of steps; Opacus' is that of changes of noise.

    A state that is loaded takes no step away. Each accountant's own steps have its name in states,
    so that those which a state lacks are known.
    """

    history: _Steps

    def __init__(self) -> None:
        super().__init__()
        self._name = secrets.token_hex(8)
        #: Loaded steps, the first of the history, by the name of the accountant that counted them.
        self._loaded: dict[str, _Steps] = {}
        self._warned_of_kept = False

    def __len__(self) -> int:
        return _count(self.history)

    def _parts(self) -> dict[str, _Steps]:
        """All steps, by who counted them."""
        before, own = sum(map(_count, self._loaded.values())), []
        for noise, rate, steps in self.history:
            of_others = min(before, steps)
            before -= of_others
            if steps > of_others:
                own.append((noise, rate, steps - of_others))
        return self._loaded | ({self._name: own} if own else {})

    def state_dict(self, destination: Any = None) -> Any:
        destination = super().state_dict(destination)  # type: ignore[misc]
        destination["parts"] = copy.deepcopy(self._parts())
        return destination

    def load_state_dict(self, state_dict: Any) -> None:
        """As in Opacus; steps of this accountant that the state lacks stay, with a warning."""
        mine = self._parts()
        super().load_state_dict(state_dict)  # type: ignore[misc]
        parts = {**(state_dict.get("parts") or {"": self.history})}
        before = sum(map(_count, parts.values()))
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # What another process of this run saved has steps that this one counted as well.
            own = _count(mine.get(self._name, []))
            parts = {who: part for who, part in parts.items() if who in mine or _count(part) > own}
        for who, part in mine.items():
            if _count(part) > _count(parts.get(who, [])):
                parts[who] = part
        parts = {who: [(*entry,) for entry in part] for who, part in parts.items()}
        kept = sum(map(_count, parts.values())) - before
        own_steps = parts.pop(self._name, [])
        self._loaded = parts
        if own_steps or kept:
            self.history = [entry for part in parts.values() for entry in part] + own_steps
            if not process_of(self).is_in_order:  # whose runs are apart
                self.history = [
                    (*kind, _count([*entries]))
                    for kind, entries in itertools.groupby(self.history, lambda entry: entry[:2])
                ]
        if kept > 0 and not self._warned_of_kept:
            self._warned_of_kept = True
            warnings.warn(
                f"load_checkpoint: found {kept} steps of this engine that the checkpoint lacks. "
                "They stay in the accountant's history: what they released is not undone by going "
                "back. If nobody saw any result of them, load the checkpoint into a new engine:\n"
                "    engine = FlashPrivacyEngine(); engine.make_private(...); "
                "engine.load_checkpoint(...)",
                stacklevel=4,
            )


@lru_cache(maxsize=4096)
def _rdp_of_step(noise_multiplier: float, sample_rate: float, orders: tuple[float, ...]) -> Any:
    """Rényi DP of one step at each order, by Opacus' formula. It is most of the cost of an ε."""
    return compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=[*orders])


class StepsOfRdpAccountant(CountsSteps, RDPAccountant):
    """Opacus', with the right length. A step's cost is computed once for a noise and a rate."""

    def get_privacy_spent(
        self, *, delta: float, alphas: list[float | int] | None = None
    ) -> tuple[float, float]:
        """As in Opacus."""
        if not self.history:
            return 0.0, 0.0
        orders = (*(self.DEFAULT_ALPHAS if alphas is None else alphas),)
        rdp = sum(_rdp_of_step(noise, rate, orders) * steps for noise, rate, steps in self.history)
        epsilon, order = get_privacy_spent(orders=[*orders], rdp=rdp, delta=delta)
        return float(epsilon), float(order)


class StepsOfGdpAccountant(CountsSteps, GaussianAccountant):
    """Opacus', with the right length."""


class FeasiblePrvAccountant(CountsSteps, PRVAccountant):
    """Opacus' default, which has an answer where there is next to no noise.

    The distribution of the privacy loss is as wide as ε. Where it would not fit in memory, or its
    exponential not in float64, ε is that of Opacus' RDP accountant, an upper bound too; without
    noise it is infinite. What is the same in every step is computed once.
    """

    def get_epsilon(
        self,
        delta: float,
        *,
        eps_error: float = 0.01,
        delta_error: float | None = None,
        **_: Any,
    ) -> float:
        """As in Opacus."""
        if any(multiplier == 0 for multiplier, _, _ in self.history):
            return math.inf
        error = delta / 1000 if delta_error is None else delta_error
        kind: Any = type(self)
        return _epsilon_by_prv(kind, (*map(tuple, self.history),), delta, eps_error, error)

    def _reach(self, history: Sequence[tuple[float, float, int]], delta: float) -> float:
        """An upper bound on ε of these steps."""
        rdp = StepsOfRdpAccountant()
        rdp.history = [*history]
        with without_hints():
            return rdp.get_privacy_spent(delta=delta)[0]

    def _get_dprv(self, eps_error: float, delta_error: float) -> Any:
        """Opacus', bit for bit, by :class:`_Truncated` and what :meth:`_reach` knows of a step."""
        counts = [steps for _, _, steps in self.history]
        reach = self._reach(self.history, delta_error / 4)
        for noise, rate, _ in self.history:
            reach = max(reach, self._reach([(noise, rate, 1)], delta_error / (8 * sum(counts))))
        reach = max(reach, eps_error) + 3
        mesh = eps_error / np.sqrt(sum(counts) * np.log(12 / delta_error) / 2)
        domain = Domain.create_aligned(-reach, reach, mesh)
        ends = domain.t_min, domain.t_max
        losses = [PoissonSubsampledGaussianPRV(rate, noise) for noise, rate, _ in self.history]
        return compose_heterogeneous(
            [discretize(_Truncated(loss, *ends), domain) for loss in losses], counts
        )


class _PlansByPrv(FeasiblePrvAccountant):
    """The same ε, up to some 1e-8, at a tenth of the cost for noise that is new: for a search."""

    def _reach(self, history: Sequence[tuple[float, float, int]], delta: float) -> float:
        rdp = StepsOfRdpAccountant()
        rdp.history = [*history]
        with without_hints():
            found, order = rdp.get_privacy_spent(delta=delta, alphas=_WHOLE_ORDERS)
        # Or the best is below these.
        return found if order > _WHOLE_ORDERS[0] else super()._reach(history, delta)


class _Truncated(TruncatedPrivacyRandomVariable):
    """Opacus', which makes arrays of each of the many numbers that its mean is integrated from."""

    def __init__(self, loss: Any, low: float, high: float):
        super().__init__(loss, low, high)
        self._loss, self._of_low = loss, loss.cdf(low)
        self._mass = loss.cdf(high) - self._of_low
        with np.errstate(divide="ignore"):
            self._least = np.log(1 - loss.sample_rate)

    def cdf(self, t: Any) -> Any:
        """As in Opacus, in the same arithmetic."""
        if not isinstance(t, float):
            return super().cdf(t)
        if not self.t_min <= t < self.t_max:
            return 0.0 if t < self.t_min else 1.0
        q, sigma, found = self._loss.sample_rate, self._loss.noise_multiplier, 0.0
        if t > self._least:
            z, scale = np.log((np.exp(t) + q - 1) / q), 2 * _SQRT_2 * sigma
            found = -q * erfc((2 * z * sigma**2 - 1) / scale) / 2
            found = found - (1 - q) * erfc((2 * z * sigma**2 + 1) / scale) / 2 + 1.0
        return (found - self._of_low) / self._mass


@lru_cache(maxsize=64)
def _epsilon_by_prv(
    kind: type[FeasiblePrvAccountant],
    history: tuple[tuple[float, float, int], ...],
    delta: float,
    eps_error: float,
    error: float,
) -> float:
    prv = kind()
    prv.history = [*history]
    upper = prv._reach(history, delta)
    steps = sum(steps for _, _, steps in history)
    points = 2 * upper / eps_error * math.sqrt(steps * math.log(12 / error) / 2)
    if upper > _MOST_LOSS or points > _MOST_POINTS:
        return upper
    return float(PRVAccountant.get_epsilon(prv, delta, eps_error=eps_error, delta_error=error))


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

    DEFAULT_ALPHAS: ClassVar[list[int]] = [*range(2, 65), *range(72, 257, 8), 320, 512]

    def get_privacy_spent(
        self, *, delta: float, alphas: list[float | int] | None = None
    ) -> tuple[float, float]:
        """As in Opacus; ``ValueError`` for orders that are not whole, or below 2."""
        if wrong := [alpha for alpha in alphas or () if alpha < 2 or alpha != int(alpha)]:
            raise InvalidValue(
                f"alphas: found {wrong}; expected whole orders, 2 or more: at others discrete "
                "noise is not accounted for."
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

    Needed where batches have a fixed size or noise is correlated; it serves ordinary Poisson
    sampling as well. Values are upper bounds on ε, up to dp-accounting's numerics.

    Attributes:
        process: how batches are drawn and noise is made; set by ``make_private``.
        history: (noise multiplier, sample rate, steps in a row).

    Raises:
        ImportError: ``dp-accounting`` is not installed.
    """

    def __init__(self) -> None:
        dp_accounting()  # said now, not when training has ended
        super().__init__()
        self.process = MechanismSpec()
        #: Whether the next step begins with noise that knows nothing of the steps before.
        self._begins = True
        #: Whether ``make_private`` has made a model private for this process.
        self.is_used = False
        #: Called where that is so after a checkpoint was loaded.
        self.before_run: Callable[[], None] | None = None

    def follow(self, process: MechanismSpec) -> None:
        """Account for this process from now on; ``ValueError`` after steps of another one."""
        if self.is_used and not (process.is_plain and self.process.is_plain):
            raise InvalidValue(
                "accountant: make_private was called on this engine before. Steps of two models, "
                "or of two runs, cannot be told apart where batches have a fixed size or noise is "
                "correlated. Use a new engine for each."
            )
        if self.history and process != self.process:
            raise InvalidValue(
                f"accountant: found {len(self)} steps of {self.process.state_dict()}, and now "
                f"{process.state_dict()}. One engine accounts for one of them: use a new engine."
            )
        self.process, self._begins, self.before_run = process, True, None

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        *kind, steps = self.history[-1] if self.history else (None, None, 0)
        is_new_run = self._begins and self.process.is_in_order
        of_round = steps % self.process.round_steps
        if of_round and not is_new_run and kind != [noise_multiplier, sample_rate]:
            raise FlashClippingError(
                f"optimizer.step(): found noise_multiplier={noise_multiplier} in step {of_round} "
                f"of a round of {self.process.round_steps}, whose steps before had {kind[0]}; "
                f"expected one for all steps of a round of sampling={self.process.sampling!r}: a "
                "sample takes part in any of them. Nothing was released. Change it when a round "
                "ends."
            )
        if kind == [noise_multiplier, sample_rate] and not is_new_run:
            self.history.pop()
        else:
            steps = 0
        self.history.append((noise_multiplier, sample_rate, steps + 1))
        self._begins = False

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """ε for this δ, for datasets that are neighbours by :attr:`MechanismSpec.relation`."""
        if any(multiplier == 0 for multiplier, _, _ in self.history):
            return math.inf
        return max((epsilon_by_pld(r, delta) for r in releases_of(self)), default=0.0)

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """As Opacus', for steps of one batch each, unless these are ordinary Poisson batches."""
        account = super().get_optimizer_hook_fn(sample_rate)

        def hook(optimizer: Any) -> None:
            if optimizer.accumulated_iterations != 1 and not self.process.is_plain:
                raise FlashClippingError(
                    f"optimizer.step(): found a step of {optimizer.accumulated_iterations} "
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
        if then is not None and (then := MechanismSpec().state_dict() | then) != now:
            raise InvalidValue(
                f"accountant: the checkpoint accounts for {then}; this engine for {now}. Make the "
                "model private as it was, and load the checkpoint then."
            )
        super().load_state_dict(state_dict)
        self._begins = True
        if self.before_run is not None:
            self.before_run()

    @classmethod
    def mechanism(cls) -> str:
        return "pld"


def with_right_length(accountant: Any) -> Any:
    """This new accountant of Opacus', as one that counts its steps."""
    ours = {
        PRVAccountant: FeasiblePrvAccountant,
        RDPAccountant: StepsOfRdpAccountant,
        GaussianAccountant: StepsOfGdpAccountant,
    }.get(type(accountant))
    return accountant if ours is None else ours()


def process_of(accountant: Any) -> MechanismSpec:
    """How the steps of an accountant draw batches and make noise; Opacus' know one way."""
    return getattr(accountant, "process", MechanismSpec())


def relation_of(accountant: Any) -> str:
    """The neighbouring relation of an accountant's ε, in words."""
    return process_of(accountant).relation


def releases_of(accountant: Any) -> list[list[Release]]:
    """What all steps released, as it is for each of the neighbours that there are."""
    runs = [process_of(accountant).releases(*entry) for entry in accountant.history]
    return [[*neighbour] for neighbour in zip(*runs, strict=True)]


@contextmanager
def without_hints() -> Iterator[None]:
    """Without Opacus' hint that other orders of RDP may be tighter: nobody here can give any."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the")
        yield


def least_noise(
    accountant: Any,
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    epsilon_tolerance: float = 0.01,
    **options: Any,
) -> float:
    """The least noise multiplier, to within the tolerance, whose ε after these steps is below the
    target, as Opacus looks for it; ``ValueError`` if none is enough.

    By the accountant that will count the steps: Opacus' PRV accountant has an ε too small, or none,
    next to no noise. Where ε jumps over the target the search ends all the same.
    """
    is_prv = type(accountant) is FeasiblePrvAccountant
    planned = _PlansByPrv() if is_prv else copy.copy(accountant)

    def epsilon(multiplier: float) -> float:
        planned.history = [(multiplier, sample_rate, steps)]
        with without_hints():
            return float(planned.get_epsilon(target_delta, **options))

    low, high = 0.0, 20.0
    while (found := epsilon(high)) > target_epsilon:
        low, high = high, 2 * high
        if high > _MOST_NOISE:
            raise InvalidValue(
                f"target_epsilon={target_epsilon} with target_delta={target_delta}: no noise "
                f"below {_MOST_NOISE:g} is enough."
            )
    while target_epsilon - found > epsilon_tolerance and high - low > 1e-9 * high:
        middle = (low + high) / 2
        if (of_middle := epsilon(middle)) <= target_epsilon:
            high, found = middle, of_middle
        else:
            low = middle
    return high


class LargeDeltaWarning(UserWarning):
    """δ is not below one over the number of samples: publishing some samples as they are has it."""


class PlanExceededWarning(UserWarning):
    """More steps than ``make_private_with_epsilon`` planned: ε is above its target."""


for accountant in (PldAccountant, DiscreteGaussianAccountant):
    register_accountant(accountant.mechanism(), accountant, force=True)
