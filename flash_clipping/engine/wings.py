"""What the wings beside the core give to ``make_private``. The core never imports a wing: each one
writes its part here when the package is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Of :mod:`flash_clipping.pipelines`: from the argument ``pipeline`` and all arguments of
#: ``make_private`` to the processes of the pipeline, or ``None`` without one.
pipeline_group: Callable[[Any, dict[str, Any]], Any]

#: Of :mod:`flash_clipping.pipelines`: the class of the private optimizer of one stage.
stage_optimizer: type[Any]
