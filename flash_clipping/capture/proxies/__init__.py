"""Bare parameters: used by a module's own forward, in whatever way it likes.

An example: ``x + self.pos[: x.shape[1]]`` in a module that owns ``pos``.

1. While the module runs, ``pos`` is a stand-in, a tensor subclass (``parameter_proxy.py``).
2. The slice is computed from a parameter alone, so it is a stand-in as well (``functions.py``).
3. The sum has an operand that carries samples, ``x``. Every sample gets the slice for itself: an
   ordinary tensor of as many rows, which an autograd function makes (``expanded`` in
   ``proxy_ops.py``). The sum is PyTorch's own.
4. In backward, what reaches row ``b`` of that tensor is the gradient of sample ``b`` with respect
   to the slice. From there autograd goes back to ``pos``, for all samples at once (``through``).

So it is for functions by element, masks of attention, and where a module repeats a parameter for
its samples (``token.expand(len(x), -1, -1)``). Any other function of samples and stand-ins is one
autograd function, of which the parameters are inputs (``mixed``). Where it is that of a layer with
a rule (``F.linear(x, weight)``), its gradient is a factor: no more is kept than the rule would
keep (``operation.py``). Before, the parameter may have been transposed, cast, or the like
(``AffineView``).

Only such operations are checked again in backward, never the module's forward.
"""

from flash_clipping.capture.proxies.functions import along as along
from flash_clipping.capture.proxies.parameter_proxy import (
    ParameterProxy as ParameterProxy,
    UnsupportedUse as UnsupportedUse,
    parameter_proxies as parameter_proxies,
    refuse_bypassed as refuse_bypassed,
)
