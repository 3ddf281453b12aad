"""What happens to a model after it was wrapped: looked for in every forward."""

from __future__ import annotations

from torch import nn
from torch.compiler import is_dynamo_compiling

from flash_clipping.capture.max_norm import embeddings_of, refuse_max_norm
from flash_clipping.capture.session import ClippingSession
from flash_clipping.integration.installed_taps import InstalledTaps
from flash_clipping.integration.parallel import refuse_around, refuse_since
from flash_clipping.integration.parameter_guards import ParameterGuards


class ModelWatch:
    """Looks at a wrapped model when its forward begins.

    Args:
        wrapper: the wrapped model; the model itself where it is used as it is.
        root: the model.
        session, taps, guards: its own.
    """

    def __init__(
        self,
        wrapper: nn.Module,
        root: nn.Module,
        session: ClippingSession,
        taps: InstalledTaps,
        guards: ParameterGuards,
    ):
        self.wrapper = wrapper
        self.session = session
        self.taps = taps
        self.guards = guards
        self._embeddings = embeddings_of(root)
        #: Whether it was looked at all that may have been done to the parameters.
        self._looked_around = False
        guards.watch_new()

    def before_forward(self, module: nn.Module) -> None:
        """Watch new parameters, take over what was compiled, and refuse what cannot be clipped.

        ``module`` is the model, or the replica of it whose forward begins.

        Raises:
            FlashClippingError: the model runs inside PyTorch's data parallelism, or was sharded; or
                a hook waits for a gradient that will not come.
            NotImplementedError: an embedding was given a ``max_norm``.
        """
        refuse_around(module)
        refuse_max_norm(self._embeddings)
        if self.guards.watch_new():
            self._looked_around = False
        if self._looked_around:
            return
        self.session.recover()  # no stand-in of a failed step may be in the way
        refuse_since(self.wrapper)
        if not is_dynamo_compiling():
            self.taps.find_compiled()
        self._looked_around = True
