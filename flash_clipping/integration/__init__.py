"""The former path of :mod:`flash_clipping.engine`. It goes with the next version."""

import sys
from importlib import import_module

_MOVED = {
    "graphed_step": "graphs.graphed_step",
    "fixed_shapes": "sampling.samplers",
    "ordered_sampling": "sampling.samplers",
    "private_optimizer": "privacy_engine",
    "samplers": "sampling.samplers",
    "sampling": "sampling.loaders",
    "unit_sampling": "sampling.loaders",
}
_KEPT = """accounting adaptive correlated_noise criterion ghost_norms
grad_sample_module optimizer pipeline_optimizer pipeline_schedule privacy_engine
private_state sharded_optimizer token_losses"""

for _name in (*_MOVED, *_KEPT.split()):
    _path = f"flash_clipping.engine.{_MOVED.get(_name, _name)}"
    sys.modules[f"{__name__}.{_name}"] = import_module(_path)
