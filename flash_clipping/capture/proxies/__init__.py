"""Bare parameters: used by a module's own forward, in whatever way it likes.

An example: ``x + self.pos[: x.shape[1]]`` in a module that owns ``pos``.

1. While the module runs, ``pos`` is a stand-in, a tensor subclass (``parameter_proxy.py``).
2. The slice is computed from a parameter alone, so it is a stand-in as well (``functions.py``).
3. The sum has an operand that carries samples, ``x``. That one operation becomes an autograd
   function, the parameter one of its inputs (``proxy_ops.py``).
4. In backward, what reaches the sum is its gradient ``G``. Of sample ``b``, with respect to the
   slice, that is ``G[b]``; from there autograd goes back to ``pos`` (``operation.py``).

Where the operation is that of a layer with a rule (``F.linear(x, weight)``, ``weight * x_hat``),
its gradient is a factor: no more is kept than the rule would keep. Before, the parameter may have
been transposed, cast, or the like (``AffineView``).

Repetitions of a stand-in, one for each sample (``token.expand(len(x), -1, -1)``), are such an
operation as well: an ordinary tensor from there on, whose rows are samples (``_over_samples``).

Only such operations are checked again in backward, never the module's forward.
"""

from flash_clipping.capture.proxies.functions import along as along
from flash_clipping.capture.proxies.parameter_proxy import (
    ParameterProxy as ParameterProxy,
    UnsupportedUse as UnsupportedUse,
    parameter_proxies as parameter_proxies,
    refuse_bypassed as refuse_bypassed,
)
