"""How batches are to be drawn and noise made, from the arguments of ``make_private``."""

from __future__ import annotations

import warnings
from typing import Any

from flash_clipping.engine.accounting import PldAccountant, Process
from flash_clipping.randomness.mechanisms import BandedNoise, IndependentNoise, NoiseMechanism


def asked_process(
    accountant: Any,
    *,
    sampling: str,
    noise: NoiseMechanism | None,
    max_batch_size: int | None,
    flash: bool,
    with_units: bool,
    arguments: dict[str, Any],
) -> Process:
    """The process that was asked for, for which the accountant is told to account.

    Args:
        accountant: the engine's.
        sampling, noise, max_batch_size: as ``make_private`` was given them.
        flash: whether the mode is ``"flash"``.
        with_units: whether privacy units are not samples of the dataset.
        arguments: others of ``make_private``.

    Raises:
        ValueError: they do not go together, or the accountant does not know the process.
    """
    noise = IndependentNoise() if noise is None else noise
    if not isinstance(noise, NoiseMechanism):
        raise ValueError(
            f"noise: found {type(noise).__name__}; expected IndependentNoise(), BandedNoise(...) "
            "or OneStepNoise(...) of flash_clipping.randomness.mechanisms."
        )
    if sampling == "poisson" and max_batch_size is None and isinstance(noise, IndependentNoise):
        process = Process()
        if isinstance(accountant, PldAccountant):
            accountant.follow(process)
        return process
    loader = arguments.get("data_loader")
    batches = len(loader) if loader is not None else 0
    cycle = noise.count if isinstance(noise, BandedNoise) else batches
    process = Process(
        sampling=sampling,
        noise=noise,
        samples=len(loader.dataset) if loader is not None else 0,
        max_batch_size=max_batch_size,
        cycle=cycle if sampling == "cyclic_poisson" else batches,
    )
    asked = f"sampling={sampling!r}, noise={type(noise).__name__}, max_batch_size={max_batch_size}"
    module = arguments.get("module")
    refused = [
        (not flash, "another grad_sample_mode than 'flash'", "Only 'flash' serves it"),
        (with_units, "units or sample_of", "It is accounted for samples of the dataset only"),
        (
            arguments.get("clipping") == "adaptive",
            "clipping='adaptive'",
            "The bound, and with it the noise, would move",
        ),
        (
            arguments.get("noise_grid", False) and not isinstance(noise, IndependentNoise),
            "noise_grid=True",
            "What is rounded off would not be taken back",
        ),
        (
            not arguments.get("poisson_sampling", True),
            "poisson_sampling=False",
            "The engine must draw the batches. Leave it at its default",
        ),
        (
            any(hasattr(p, "placements") for p in module.parameters()) if module else False,
            "a model that fully_shard was applied to",
            "Train in one process",
        ),
        (
            not isinstance(accountant, PldAccountant),
            f"accountant={accountant.mechanism()!r}",
            "It knows ordinary Poisson sampling with independent noise only. Use "
            "FlashPrivacyEngine(accountant='pld') (the extra flash-clipping[accounting])",
        ),
    ]
    for found, name, advice in refused:
        if found:
            raise ValueError(f"make_private: found {asked} with {name}. {advice}.")
    accountant.follow(process)
    return process


def planned_noise(accountant: PldAccountant, arguments: dict[str, Any]) -> float:
    """The noise multiplier for the target that ``make_private_with_epsilon`` was given.

    Args:
        accountant: the engine's.
        arguments: of the call; what only it takes is taken out.

    Warns:
        UserWarning: some of the budget is spent already.
    """
    target = {name: arguments.pop(name) for name in ("target_epsilon", "target_delta")}
    epochs, tolerance = arguments.pop("epochs"), arguments.pop("epsilon_tolerance", 0.01)
    asked_process(
        accountant,
        sampling=arguments.get("sampling", "poisson"),
        noise=arguments.get("noise"),
        max_batch_size=arguments.get("max_batch_size"),
        flash=True,
        with_units=False,  # make_private looks
        arguments=arguments,
    )
    if len(accountant):
        warnings.warn(
            f"make_private_with_epsilon: {len(accountant)} steps are accounted for already; the "
            "noise is for the target without them.",
            stacklevel=4,
        )
    batches = len(arguments["data_loader"])
    return accountant.noise_multiplier(
        **target,
        sample_rate=1 / batches,
        steps=int(epochs * batches),
        epsilon_tolerance=tolerance,
    )
