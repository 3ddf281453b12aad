"""What a user of Opacus meets: the engine, the wrapped module, the optimizer, the criterion and the
loaders. Below it, only ``rules/opacus_layers.py`` knows Opacus (and ``_compat.py``)."""

from importlib import import_module

# Wings beside the core register what they have: whoever has an engine has them. None is read here.
import_module("flash_clipping.public")
