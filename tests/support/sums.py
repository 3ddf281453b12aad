"""What the engine holds of a step without noise, for tests: per-parameter norms, clipped sums."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_clipping import FlashDPOptimizer


def norm_of(flash: Any, param: Any) -> Tensor:
    """Norms of this parameter's gradients in the last backward, ``[B]``."""
    found: Tensor = flash.running_step.norms_of([param]).norms_PB[0]
    return found


def note_sums(optimizer: Any) -> list[list[Tensor]]:
    """A list that gets the clipped sums of each step, parameter by parameter, before its noise."""
    found: list[list[Tensor]] = []
    add_noise = optimizer.add_noise

    def noting() -> None:
        if isinstance(optimizer, FlashDPOptimizer):
            sums = [optimizer._own(summed) for summed in optimizer._sums()]
        else:  # of Opacus
            sums = [param.summed_grad for param in optimizer.params]
        found.append([summed.clone() for summed in sums])
        add_noise()

    optimizer.add_noise = noting
    return found
