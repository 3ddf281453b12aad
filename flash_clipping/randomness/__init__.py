"""Random words that nobody can guess, none of them twice: what noise and sampling are made of.

* ``stream.py``: keys, and which part of its words each draw takes;
* ``chacha.py``: the words of a draw on the CPU (the kernel for GPUs is in ``ops/noise``);
* ``choices.py``: coin tosses and subsets, of which batches are made.
"""

from flash_clipping.randomness.stream import (
    ALL_ROUNDS as ALL_ROUNDS,
    FEWER_ROUNDS as FEWER_ROUNDS,
    Draw as Draw,
    Purpose as Purpose,
    SecretStream as SecretStream,
    SeededNoiseWarning as SeededNoiseWarning,
)
