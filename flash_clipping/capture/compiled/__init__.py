"""Compiled models: how layers inside a graph leave what clipping needs.

From the inside out:

* ``wires``: a layer's rule in a region, whose factors' tensors leave as gradients of *wires*.
* ``unbatched``: values that are the same for all samples.
* ``layout``: what one call of a region leaves, and how it is recorded.
* ``tracing``: what runs while Dynamo traces, and notes before what layers leave.
* ``regions``: the compiled parts of the model, found and put back.

Inside a compiled region nothing can be recorded on the side. So every tapped layer takes, besides
its input, wires: tensors of one element, expanded to the shapes of what its factors hold. The
layer's backward is that of its rule, and returns the input, the output gradient or per-sample
vectors as the gradients of these. Forward and backward are then pure functions, which Dynamo and
AOTAutograd trace whole.

What is wired: layers whose rule can be traced (``Rule.can_be_traced``), called with one tensor,
once or several times in a region, where it was shown that they read samples; what is the same for
all samples; and parameters that modules use themselves. Any other layer with trainable parameters
(``nn.EmbeddingBag``, ``nn.MultiheadAttention``, recurrent layers) runs alone, between two
graphs; with ``fullgraph=True`` it is an error that names it.
"""
