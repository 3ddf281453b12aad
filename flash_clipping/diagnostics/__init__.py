"""Check a model against a float64 oracle, layer by layer; describe the installation.

``flash-clipping check`` and ``flash-clipping env`` print what :func:`check` and
:func:`environment` return.
"""

from flash_clipping.diagnostics.check import check
from flash_clipping.diagnostics.environment import environment, environment_text
from flash_clipping.diagnostics.oracle import FLOOR, TOLERANCE, BadBatchError
from flash_clipping.diagnostics.report import (
    CheckReport,
    ParameterReport,
    RemovalReport,
    summary,
    table,
)

__all__ = [
    "FLOOR",
    "TOLERANCE",
    "BadBatchError",
    "CheckReport",
    "ParameterReport",
    "RemovalReport",
    "check",
    "environment",
    "environment_text",
    "summary",
    "table",
]
