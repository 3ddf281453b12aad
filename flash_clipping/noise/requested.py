"""The mechanism that arguments of ``make_private`` ask for, and what does not go with it."""

from __future__ import annotations

from typing import Any

from flash_clipping.engine.accounting import Mechanism
from flash_clipping.errors import InvalidValue
from flash_clipping.noise.accountants import PldAccountant
from flash_clipping.noise.correlated import CorrelatedNoise
from flash_clipping.noise.mechanisms import IndependentNoise
from flash_clipping.noise.process import PoissonSampling
from flash_clipping.noise.samplers import RoundSampler


def requested_process(accountant: Any, given: dict[str, Any]) -> Mechanism:
    """The mechanism that ``make_private`` was given, for its dataset; the accountant is told.

    ``ValueError`` if other arguments do not go with it, or the accountant does not know it.
    """
    mechanism: Mechanism = given.get("mechanism") or PoissonSampling()
    needed, advice = "discrete_gaussian" if mechanism.noise_grid == "exact" else "pld", {}
    if needed != "pld" or not mechanism.is_plain:
        if given.get("clipping") == "adaptive":
            advice["clipping='adaptive'"] = "The bound moves, by a count with continuous noise"
        if not given.get("poisson_sampling", True):
            advice["poisson_sampling=False"] = "The engine must draw the batches"
        if accountant.mechanism() != needed:
            advice[f"accountant={accountant.mechanism()!r}"] = (
                "Its formulas are not proven for it. Use "
                f"FlashPrivacyEngine(accountant={needed!r}) (the extra flash-clipping[accounting])"
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
    used: after a checkpoint was loaded, noise and rounds of the sampler begin anew."""
    begins_anew = sampler.begin_run if isinstance(sampler, RoundSampler) else None
    noise = getattr(mechanism, "noise", IndependentNoise())
    if not isinstance(noise, IndependentNoise):
        optimizer.correlated = CorrelatedNoise(noise, sampler.check_step)
        begins_anew = optimizer.correlated.begin_run
    if isinstance(accountant, PldAccountant):
        accountant.is_used, accountant.before_run = True, begins_anew
