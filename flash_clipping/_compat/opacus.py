"""Opacus, which is imported by those who ask."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from flash_clipping._compat.lookup import attribute


def functions_of_optimizer() -> tuple[Any, Any]:
    """Of Opacus: refuses sums that a step has used, and marks them. Without: an error."""
    from opacus.optimizers import optimizer

    check = attribute(optimizer, "_check_processed_flag", "Opacus")
    return check, attribute(optimizer, "_mark_as_processed", "Opacus")


def check_optimizer(optimizer: Any) -> None:
    """Attributes of Opacus' optimizer, by which skipped steps are known. Without: an error."""
    for name in ("_step_skip_queue", "_is_last_step_skipped"):
        attribute(optimizer, name, "Opacus")


def check_engine(engine: type) -> None:
    """Methods of Opacus' engine that are overridden. Without: an error."""
    for name in ("_model", "_data_loader", "_optimizer", "_criterion"):
        attribute(engine, f"_prepare{name}", "Opacus")


def explain_flash_mode() -> None:
    """Have Opacus' own engines say where ``grad_sample_mode="flash"`` is. Without: they say which
    modes they know."""
    from opacus.grad_sample import utils

    def explained(known: Any) -> Any:
        @functools.wraps(known)
        def find(grad_sample_mode: str) -> Any:
            if grad_sample_mode == "flash":
                raise ValueError(
                    'grad_sample_mode="flash": found with an engine of Opacus\'. Use\n'
                    "    flash_clipping.FlashPrivacyEngine().make_private(...)\n"
                    "and, in the place of PrivacyEngineAdaptiveClipping, give it "
                    'clipping="adaptive".'
                )
            return known(grad_sample_mode)

        return find

    for name in ("get_gsm_class", "get_hooks_class"):
        if (known := getattr(utils, name, None)) is not None:
            setattr(utils, name, explained(known))


@contextmanager
def without_validator(kind: type[nn.Module]) -> Iterator[None]:
    """Opacus' validation without its verdict on one type. Without: with it."""
    from opacus.validators import ModuleValidator

    validators = getattr(ModuleValidator, "VALIDATORS", {})
    verdict = validators.pop(kind, None)
    try:
        yield
    finally:
        if verdict is not None:
            validators[kind] = verdict
