"""Compiled models: how layers inside a graph leave what clipping needs.

From the inside out:

* ``wirings``: what each kind of layer hands out, as gradients of *wires*.
* ``unbatched``: values that are the same for all samples.
* ``tracing``: what runs while Dynamo traces, and notes what layers see before.
* ``layout``: the wires of one call of a region, made and received, and how their shapes follow from
  those of inputs.
* ``regions``: the compiled parts of the model, found and put back.

Inside a compiled region nothing can be recorded on the side. So every tapped layer takes, besides
its input, wires: tensors of one element, expanded to the shapes of what clipping needs. The layer's
backward returns the input, the output gradient or per-sample vectors as the gradients of these.
Forward and backward are then pure functions, which Dynamo and AOTAutograd trace whole.

What is wired: ``nn.Linear`` and ``transformers``' ``Conv1D``, ``nn.Embedding``, ``nn.LayerNorm``,
``nn.RMSNorm``, ``nn.GroupNorm``, ``nn.InstanceNorm1d/2d/3d`` and ``nn.Conv1d/2d/3d``, called with
one tensor, once or several times in a region, where it was shown that they read samples;
what is the same for all samples; and parameters that modules use themselves. Any other layer with
trainable parameters (``nn.EmbeddingBag``, ``nn.MultiheadAttention``, recurrent
layers, rules of users) runs by itself, between two graphs; with ``fullgraph=True`` it is an error
that names it.
"""
