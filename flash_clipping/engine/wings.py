"""What the wings beside the core give to ``make_private``. The core never imports a wing: each one
writes its part here when the package is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

#: Of :mod:`flash_clipping.pipelines`: from the argument ``distributed`` and all arguments of
#: ``make_private`` to the processes of the pipeline, or ``None`` without one.
pipeline_group: Callable[[Any, dict[str, Any]], Any]

#: Of :mod:`flash_clipping.pipelines`: the class of the private optimizer of one stage.
stage_optimizer: type[Any]

#: Of :mod:`flash_clipping.one_by_one`: stands in for the call of a wrapped model's root.
one_by_one: Callable[[Any, Any, list[Any]], Any]

#: Of :mod:`flash_clipping.graphs`: lets the calls of a private model be replayed.
replay_calls: Callable[[Any], None]

#: Of :mod:`flash_clipping.hugging_face`: hooks for losses that a model computes itself, and around
#: layers that ``transformers`` has cut over processes.
own_losses: Callable[[Any, Any, list[Any]], Any]
lay_out_by_hooks: Callable[[Any, list[Any]], None]

#: Of the same: refuses a module, at its path, that rounds rows of a batch together; the path of a
#: layer that rounds gradients by a scale, or "", and what refuses a mean over the batch for it.
refuse_rounding: Callable[[str, nn.Module], None]
rounds_by_scale: Callable[[nn.Module], str]
refuse_mean: Callable[[str], None]

#: Of :mod:`flash_clipping.noise`: the mechanism that there is if nothing else is said.
PoissonSampling: type[Any]

#: Of the same: from the accountant and all arguments of ``make_private`` to the mechanism for its
#: dataset, or an error; what tells accountant and optimizer of it; noisy means whose noise is of
#: integers; ``FlashPrivacyEngine.report``.
requested_process: Callable[[Any, dict[str, Any]], Any]
begin_process: Callable[[Any, Any, Any, Any], None]
discrete_noisy_means: Callable[..., list[Tensor]]
make_report: Callable[[Any, float], dict[str, Any]]
