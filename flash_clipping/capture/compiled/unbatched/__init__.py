"""What is the same for all samples, inside compiled regions.

An embedding of positions reads ids that do not derive from the batch, ``[1, T]``, and a module adds
its own parameter to what it is given. Neither has a row for each sample, so the gradient that
arrives there is a sum over samples. Here such a value has one more axis, ``[B, *shape]``: all rows
are alike, and the gradient of row ``b`` is that of sample ``b``. The model does not see it: it
gets a :class:`Unbatched`, a tensor subclass that says to be of ``shape`` and runs functions on the
memory behind it. Where one meets samples, ``x + z``, row ``b`` meets sample ``b``, and what comes
out are samples.

Dynamo traces all of it away: what is left are views and the model's own operators. Only functions
that are known to keep the samples apart are served. Any other is found when the region is run
uncompiled to learn its shapes (the layers then have no wires), and is an error where it is found
later.

* ``tensor``: the tensor itself, and what it does with functions of it.
* ``functions``: those that are served.
* ``learning``: what is noted of others while a region learns its shapes.

Shape suffixes: ``B`` samples.
"""

from flash_clipping.capture.compiled.unbatched.functions import FUNCTIONS
from flash_clipping.capture.compiled.unbatched.learning import (
    is_checkpointed,
    noting_misuse,
    was_used,
)
from flash_clipping.capture.compiled.unbatched.tensor import (
    SERVED,
    SameRows,
    Unbatched,
    memory_of,
    note_escaped,
    note_use,
    rows_of,
    same_for_all,
    without_same,
)

SERVED.update(FUNCTIONS)

__all__ = [
    "Unbatched",
    "SameRows",
    "is_checkpointed",
    "memory_of",
    "note_escaped",
    "note_use",
    "noting_misuse",
    "rows_of",
    "same_for_all",
    "was_used",
    "without_same",
]
