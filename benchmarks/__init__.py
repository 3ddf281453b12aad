"""Measure flash clipping against the non-private step and against its peers.

``python -m benchmarks --help`` lists the subcommands. Where to find what:

* ``workload.py``    a model and its data; ``models.py`` knows all by their names
* ``methods.py``     one class per method: how it is set up and what one of its steps is
* ``measure.py``     clocks and peak memory, the same calls on CUDA and on a CPU
* ``agreement.py``   do the methods compute the same thing? asked before anything is timed
* ``session.py``     methods in turn on one device; out of memory is an answer, not a crash
* ``records.py``     what a JSON file holds
* ``step.py``, ``trainer.py``   what users wait for; ``tables.py`` runs all
* ``report.py``, ``plot.py``   pages and pictures of the results
* ``ops/``           operations beside the floor of what they do, by one harness
* ``survey/``        models of transformers: exact, exact with help, or refused
* ``certificate.py`` how far one sample moves what is released; its attacks: ``tests/certificate``
* ``lab/``           developers' own tools, and what was tried (``NOTES.md``)
"""
