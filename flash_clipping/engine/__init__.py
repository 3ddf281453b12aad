"""What a user of Opacus meets: the engine, the wrapped module, the optimizer, the criterion and the
loaders. Below it, only ``rules/opacus_layers.py`` knows Opacus (and ``_compat.py``)."""
