"""Models whose layers are cut over several processes: PyTorch's ``parallelize_module``.

The processes of a *tensor mesh* run the model on the same batch. Each has a part of a layer, a
``DTensor``, and so a part of every sample's gradient. Kernels never see a ``DTensor``: at the edge
of a tapped layer its tensors become the local ones of this process.

* ``local.py``: tensors as this process has them;
* ``layouts.py``: from how weight and input lie to how the output lies, and which part of a
  per-sample gradient a process has;
* ``layers.py``: a rule around a layer's own rule, which converts on the way in and out;
* ``norm_all_reduce.py``: what they tell each other once in a backward pass;
* ``transformers_plan.py``: layers that ``transformers`` has cut.
"""
