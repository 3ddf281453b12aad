"""Models whose parameters are shards: PyTorch's ``fully_shard`` (FSDP2), its hybrid form (HSDP),
experts in parallel, and ``parallelize_module`` (tensor parallelism), alone or below
``fully_shard``.

A parameter is a *slot*: the module that has it, and its name there. Two tensors take turns in it.
Between steps that is a shard, a ``DTensor``: there the sum goes, and the optimizer reads it. While
the module runs it is the whole, unsharded parameter: that is what layers compute with and record.

* ``parameter_slots.py``: the slots of a model, and which tensors were in them;
* ``process_groups.py``: which processes have other samples, and which share them; the key of noise
  that they agree on, and the number of a shard;
* ``backward_pass.py``: one backward pass, whose norms need no other process unless these share
  their samples; ``reducer.py``: its clipped sums, in an order that all share, into the shards;
* ``synchronized_probe.py``: rehearsals that all processes run at the same time;
* ``model.py``: puts these in the place of what an ordinary model has; a process whose local batch
  is empty takes part in all that the others do;
* ``tensor/``: layers that are cut over processes which share their samples;
* ``experts.py``: experts of which each process has its own, and the samples that reach them.

But for ``tensor/`` a process has its own samples; their norms and coefficients are its own, but for
what experts in other processes have of them.
Communication follows one rule: every process starts the same operations in the same order, whatever
batch it has.
"""

from flash_clipping.distributed.supported import (
    has_shards,
    is_sharded,
    is_tensor_parallel,
    processes_of,
    refuse_sharding,
    reshard,
    sharded_model,
    shared_in_group,
)

__all__ = [
    "has_shards",
    "is_sharded",
    "is_tensor_parallel",
    "processes_of",
    "refuse_sharding",
    "reshard",
    "sharded_model",
    "shared_in_group",
]
