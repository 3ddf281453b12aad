"""Check a model against a float64 oracle, layer by layer; describe the installation.

``flash-clipping check`` and ``flash-clipping env`` print what :func:`check` and
:func:`environment` return.
"""

from flash_clipping.diagnostics.check import check
from flash_clipping.diagnostics.environment import environment
from flash_clipping.diagnostics.factory import load_factory
from flash_clipping.diagnostics.oracle import BadBatchError
from flash_clipping.diagnostics.report import CheckReport, ParameterReport

__all__ = [
    "BadBatchError",
    "CheckReport",
    "ParameterReport",
    "check",
    "environment",
    "load_factory",
]
