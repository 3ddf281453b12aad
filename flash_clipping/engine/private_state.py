"""A private run for ``torch.distributed.checkpoint``, with any number of processes."""

from __future__ import annotations

import json
from typing import Any

from flash_clipping.engine.optimizer import FlashDPOptimizer
from flash_clipping.engine.privacy_engine import FlashPrivacyEngine
from flash_clipping.errors import FlashClippingError


class PrivateState:
    """Model, optimizer and accountant of a run, as ``torch.distributed.checkpoint`` takes them.

    Example::

        state = PrivateState(engine, model, optimizer)
        dcp.save({"run": state}, checkpoint_id="folder")
        ...  # later, with any number of processes: fully_shard, make_private, and
        dcp.load({"run": PrivateState(engine, model, optimizer)}, checkpoint_id="folder")

    To load takes no step: nothing is accounted and no noise is drawn. The accountant goes on with
    the steps that were saved; batches and noise come from new keys.

    Args:
        engine: a ``FlashPrivacyEngine``.
        model: what ``make_private`` returned, or the plain model.
        optimizer: what ``make_private`` returned.
        extra: numbers, strings, lists and dicts to save beside; after loading, what was saved.

    Raises:
        FlashClippingError: in the midst of a step whose first parts were taken already.
        ValueError: in loading, with an engine that has accounted for steps, which would be
            forgotten.
    """

    def __init__(
        self, engine: FlashPrivacyEngine, model: Any, optimizer: FlashDPOptimizer, extra: Any = None
    ):
        self.engine, self.optimizer, self.extra = engine, optimizer, extra
        self.model = getattr(model, "_module", model)

    def state_dict(self) -> dict[str, Any]:
        """Called by ``torch.distributed.checkpoint``, in all processes."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        if self.optimizer.step_record is not None:
            raise FlashClippingError(
                "FC580 PrivateState: found a step of which some parts were taken and others not. "
                "They would be lost. Save after a whole step."
            )
        bounds = self.optimizer.max_grad_norms
        private = {
            # An accountant's lists would be loaded entry by entry, as many as are there already.
            "accountant": dict(self.engine.accountant.state_dict()),
            "bound": self.optimizer.max_grad_norm if bounds is None else bounds,
            "extra": self.extra,
        }
        model, optimizer = get_state_dict(self.model, self.optimizer.original_optimizer)
        return {"model": model, "optimizer": optimizer, "private": json.dumps(private)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called by ``torch.distributed.checkpoint``, in all processes."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        private = json.loads(state["private"])
        self.engine.accountant.load_state_dict(private["accountant"])
        set_state_dict(
            self.model,
            self.optimizer.original_optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.optimizer.max_grad_norm = private["bound"]
        self.extra = private["extra"]
