"""After ``make_private``: batches are announced to the model, and steps compared with batches."""

from __future__ import annotations

import warnings
from typing import Any

from flash_clipping.engine.sampling.loaders import NotPoissonWarning, is_accounted_for
from flash_clipping.engine.sampling.ordered import OrderedSampler
from flash_clipping.engine.sampling.samplers import PoissonSampler
from flash_clipping.engine.sampling.units import UnitSampler


def watch_sampling(engine: Any, module: Any, optimizer: Any, loader: Any) -> None:
    """Announce batches to the model; warn when steps were not sampled as they are accounted.

    Args:
        engine: whose accountant counts the steps; it warns once.
        module: the wrapped model, or its hooks.
        optimizer: with the accountant's step hook.
        loader: what ``make_private`` returns.
    """
    sampler, session = loader.batch_sampler, module._session
    units = session.units_of_calls
    units.from_loader = isinstance(sampler, UnitSampler)
    units.are_items = isinstance(sampler, PoissonSampler)
    session.padding.rows = getattr(sampler, "max_batch_size", None)
    announce = getattr(sampler, "announce", None)
    session.whole_batches = announce is not None and announce.strict
    if isinstance(sampler, PoissonSampler):
        sampler.announce.follow(module)
    elif not is_accounted_for(loader):
        _warn(engine, f"poisson_sampling=False, and a loader with {type(sampler).__name__}")
    #: Steps on batches that nobody announced: BatchMemoryManager's, whose workers collate.
    silent, account = 0, optimizer.step_hook

    def note_step(optimizer: Any) -> None:
        nonlocal silent
        record = optimizer.step_record
        draw = None if record is None else record.draw
        if isinstance(sampler, OrderedSampler):
            sampler.check_step(draw)  # before noise is drawn, too, where it is correlated
            sampler.taken += 1
        elif isinstance(sampler, PoissonSampler):
            silent += draw is None
            if draw is not None and draw.stepped:
                _warn(engine, f"a second step on batch {draw.number} of the loader")
            elif draw is None and silent > sampler.drawn - sampler.announce.given:
                _warn(
                    engine,
                    "a step on a batch that the loader which make_private returned did not give "
                    "for it",
                )
        if draw is not None:
            draw.stepped = True
        account(optimizer)

    optimizer.attach_step_hook(note_step)


def _warn(engine: Any, found: str) -> None:
    if not engine._warned_not_poisson:
        engine._warned_not_poisson = True
        warnings.warn(
            f"Batches are not drawn by Poisson sampling: found {found}. The accountant assumes "
            "that every step draws every sample independently with the sample rate; for other "
            "batches the epsilon that it reports is an approximation that may be too small. "
            "Take batches from the loader that make_private returns, with "
            "poisson_sampling=True. (Trainers that make their own loaders must be given this "
            "one, and a datamodule must return it.) This is said once.",
            NotPoissonWarning,
            stacklevel=5,
        )
