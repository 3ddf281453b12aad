"""What arguments of ``make_private`` ask of sampling and noise, and which of them go together."""

from __future__ import annotations

from typing import Any

from flash_clipping.errors import InvalidValue
from flash_clipping.noise.accountants import DiscreteGaussianAccountant, PldAccountant
from flash_clipping.noise.correlated import CorrelatedNoise
from flash_clipping.noise.mechanisms import BandedNoise, IndependentNoise, NoiseMechanism
from flash_clipping.noise.process import MechanismSpec
from flash_clipping.noise.samplers import RoundSampler


def requested_process(accountant: Any, given: dict[str, Any]) -> MechanismSpec:
    """The process that arguments of ``make_private`` ask for, which the accountant is told.

    ``ValueError`` if they do not go together, or the accountant does not know the process.
    """
    noise = IndependentNoise() if given.get("noise") is None else given["noise"]
    sampling, max_batch_size = given.get("sampling", "poisson"), given.get("max_batch_size")
    if not isinstance(noise, NoiseMechanism):
        raise InvalidValue(
            f"FC301 noise: found {type(noise).__name__}; expected IndependentNoise(), "
            "BandedNoise(...), BandedInverseNoise(...) or BufferedNoise(...) of "
            "flash_clipping.noise.mechanisms."
        )
    participations = given.get("participations", 1)
    asked = sampling, max_batch_size, participations
    if asked == ("poisson", None, 1) and isinstance(noise, IndependentNoise):
        process = MechanismSpec()
        if isinstance(accountant, PldAccountant):
            accountant.follow(process)
        return process
    loader = given["data_loader"]
    by_rows, in_groups = sampling == "poisson_rows", sampling == "cyclic_poisson"
    process = MechanismSpec(
        sampling=sampling,
        noise=noise,
        samples=len(loader.dataset),
        max_batch_size=max_batch_size,
        cycle=noise.count if in_groups and isinstance(noise, BandedNoise) else len(loader),
        participations=participations,
        rows_per_unit=given.get("max_rows_per_unit") if by_rows else None,
    )
    with_units = given.get("units") is not None and not by_rows
    advice: dict[str, str] = {}
    if by_rows and given.get("units") is None:
        advice["no units"] = "Give the owner of every row, units=ids, for whom epsilon is"
    if given.get("grad_sample_mode", "flash") != "flash":
        advice["another grad_sample_mode than 'flash'"] = "Only 'flash' serves it"
    if with_units or given.get("sample_of") is not None:
        advice["units or sample_of"] = "It is accounted for samples of the dataset only"
    if given.get("clipping") == "adaptive":
        advice["clipping='adaptive'"] = "The bound, and with it the noise, would move"
    if given.get("noise_grid", False) and not isinstance(noise, IndependentNoise):
        advice["noise_grid=True"] = "What is rounded off would not be taken back"
    if not given.get("poisson_sampling", True):
        advice["poisson_sampling=False"] = (
            "The engine must draw the batches. Leave it at its default"
        )
    if not isinstance(accountant, PldAccountant):
        advice[f"accountant={accountant.mechanism()!r}"] = (
            "It knows ordinary Poisson sampling with independent noise only. Use "
            "FlashPrivacyEngine(accountant='pld') (the extra flash-clipping[accounting])"
        )
    _refuse(
        f"sampling={sampling!r}, noise={type(noise).__name__}, max_batch_size={max_batch_size}",
        advice,
    )
    accountant.follow(process)
    return process


def _refuse(named: str, advice: dict[str, str]) -> None:
    """Raise ``ValueError`` for the first of these, which were found with what is named."""
    for found, instead in advice.items():
        raise InvalidValue(f"FC316 make_private: found {named} with {found}. {instead}.")


def check_noise_grid(accountant: Any, given: dict[str, Any]) -> None:
    """Raise ``ValueError`` for an unknown ``noise_grid``, and for ``"exact"`` with what its
    discrete noise is not accounted for."""
    grid = given["noise_grid"]
    if not (isinstance(grid, bool) or grid == "exact"):
        raise InvalidValue(f"FC301 noise_grid: found {grid!r}; expected False, True or 'exact'.")
    if grid != "exact":
        return
    advice: dict[str, str] = {}
    if not isinstance(accountant, DiscreteGaussianAccountant):
        advice[f"accountant={accountant.mechanism()!r}"] = (
            "Its formulas are those of the continuous Gaussian, which are not proven for discrete "
            "noise. Use FlashPrivacyEngine(accountant='discrete_gaussian')"
        )
    if given["clipping"] == "adaptive":
        advice["clipping='adaptive'"] = (
            "The noise on its count of samples is continuous. Use another clipping"
        )
    if not given["poisson_sampling"]:
        advice["poisson_sampling=False"] = (
            "Only Poisson batches are accounted for exactly. Leave it at its default"
        )
    _refuse("noise_grid='exact'", advice)


def begin(process: MechanismSpec, accountant: Any, optimizer: Any, sampler: Any) -> None:
    """Let a private optimizer make the noise of this process, and the accountant know that it is
    used: after a checkpoint was loaded, noise and rounds of the sampler begin anew."""
    begins_anew = sampler.begin_run if isinstance(sampler, RoundSampler) else None
    if not isinstance(process.noise, IndependentNoise):
        optimizer.correlated = CorrelatedNoise(process.noise, sampler.check_step)
        begins_anew = optimizer.correlated.begin_run
    if isinstance(accountant, PldAccountant):
        accountant.is_used, accountant.before_run = True, begins_anew
