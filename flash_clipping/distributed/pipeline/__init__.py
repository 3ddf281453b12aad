"""Stages of a pipeline: ``torch.distributed.pipelining``, one stage in each process.

A sample's gradient is over all stages, and so are its norm and its coefficient. A stage knows its
part of the squared norm only. So what backward passes have recorded is held until the last one of a
step; squared norms are added up over stages in one operation; then every stage clips by the same
coefficients.

* ``stage.py``: backward passes that wait for their coefficients, norms over all stages, and the
  stream of batches that all of them draw alike;
* ``microbatches.py``: Poisson batches as the fixed number of samples that stages send each other.
"""
