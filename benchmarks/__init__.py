"""Measure flash clipping against the non-private step and against its peers.

``python -m benchmarks --help`` lists the subcommands. Where to find what:

* ``models.py``      the models that can be named, and what a user's own factory returns
* ``methods.py``     one class per method: how it is set up and what one of its steps is
* ``measure.py``     clocks and peak memory, the same calls on CUDA and on a CPU
* ``agreement.py``   do the methods compute the same thing? asked before anything is timed
* ``session.py``     methods in turn on one device; out of memory is an answer, not a crash
* ``records.py``     what a JSON file holds
* ``step.py``, ``memory.py``, ``plot.py``, ``report.py``   one subcommand each
* ``certificate.py`` how far one sample moves what is released; its attacks: ``tests/certificate``
"""
