"""Several optimizers as one, of which each steps on parameters of its own."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from flash_clipping.errors import InvalidValue


class SeveralOptimizers(Optimizer):
    """Several optimizers as one, for parameters that have different ones::

        muon, adamw = torch.optim.Muon(matrices), torch.optim.AdamW(others)
        optimizer = flash_clipping.SeveralOptimizers(muon, adamw)

    All parameters count in the norm of a sample, and all sums get their noise before any optimizer
    steps. Schedulers may be made of each; ``param_groups`` holds the groups of all.

    Raises:
        ValueError: two have a parameter in common; a group is added later.
    """

    def __init__(self, *optimizers: Optimizer):
        self.optimizers: tuple[Optimizer, ...] = ()
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.optimizers = optimizers

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.optimizers:
            raise InvalidValue(
                "FC541 add_param_group: found several optimizers; expected one, which is to step "
                "on the new parameters. Add them to it, and make the private optimizer again:\n"
                "    adamw.add_param_group(group)"
            )
        super().add_param_group(param_group)

    def step(self) -> None:  # type: ignore[override]  # takes no closure
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
