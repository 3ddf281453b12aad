"""One backward pass of a stage: its norms are taken at once, its sums when all stages have theirs.

Shape suffixes: ``B`` samples of the micro-batch, ``P`` parameters of the stage.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flash_clipping.capture.session import ClippingSession
from flash_clipping.finish.backward_pass import BackwardPass
from flash_clipping.finish.clipping import Doubts
from flash_clipping.finish.coefficients import Coefficients


class StageBackwardPass(BackwardPass):
    """The backward pass of one micro-batch.

    Args:
        session: of the stage's module.
        hold: takes it when it has its norms, until coefficients are known.

    Attributes:
        norms_PB: of every sample's own gradient, over this stage's parameters.
        doubts: what rounding may hide of them.
    """

    norms_PB: Tensor
    doubts: Doubts

    def __init__(self, session: ClippingSession, hold: Callable[[StageBackwardPass], None]):
        super().__init__(session)
        self._hold = hold
        self._trainable: list[nn.Parameter] = []

    def finish(self) -> None:
        """Take the norms, and wait; a pass that fails lets go of its factors."""
        held = False
        with torch.no_grad():
            try:
                self.put_back()
                if self._is_for_parameters():
                    self.take_norms()
                    self._hold(self)
                    held = True
            finally:
                if not held:
                    self.forget()
                self.session.end_backward(held)

    def _clip(
        self, params: list[nn.Parameter], norms_PB: Tensor, doubts: Doubts, one_device: bool
    ) -> Tensor:
        """Keep the norms; what is returned is nobody's coefficient."""
        self._trainable, self.norms_PB, self.doubts = params, norms_PB, doubts
        return norms_PB.new_ones(norms_PB.shape[1])

    def complete(self, coef_B: Tensor) -> None:
        """Add the clipped sums into ``p.grad``.

        Args:
            coef_B: coefficients by norms over all stages; exactly 0 for samples that are made up.
        """
        assert self.plan is not None
        with torch.no_grad():
            try:
                coef_B = coef_B * self.doubts.scale
                self.coef = Coefficients(coef_B, self._trainable, self.plan)
                self.add_clipped_sums()
            finally:
                self.forget()
