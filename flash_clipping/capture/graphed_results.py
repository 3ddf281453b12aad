"""What steps that are captured as a CUDA graph leave for each replay to hand on.

Shape suffixes: ``B`` samples, ``P`` parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from flash_clipping.finish.plan import Plans


@dataclass
class GraphedResults:
    """What backward passes would leave behind that are captured as a CUDA graph, for its replays.

    Attributes:
        plans: those that were made meanwhile: their tables are in the graph's memory.
        norms: the trainable parameters, their norms ``[P, B]`` and what these were clipped by,
            backward by backward.
        coefs: coefficients, likewise.
    """

    plans: Plans
    norms: list[tuple[list[nn.Parameter], Tensor, Tensor]] = field(default_factory=list)
    coefs: list[Tensor] = field(default_factory=list)
