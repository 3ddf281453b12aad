"""Layers and parameters that no clipping can bound, or that no tap can serve."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from opacus.validators import ModuleValidator
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod as _Pruning

from flash_clipping._compat import BATCH_NORMS, hooks_of_module, without_validator
from flash_clipping.capture.max_norm import embeddings_of, refuse_max_norm
from flash_clipping.distributed import refuse_sharding
from flash_clipping.engine.parallel import refuse_inside
from flash_clipping.errors import FlashClippingError, module_at, to_freeze_parameters

#: Hooks of ``torch.nn.utils`` that compute a weight, and the functions that put them there. (The
#: functions have the names of the modules.)
_COMPUTING_HOOKS: dict[type, str] = {
    import_module("torch.nn.utils.spectral_norm").SpectralNorm: "spectral_norm",
    import_module("torch.nn.utils.weight_norm").WeightNorm: "weight_norm",
}

#: Layers that read their parameters past any stand-in, and what to use instead.
_REPLACED_LAYERS = {nn.LSTM: "DPLSTM", nn.GRU: "DPGRU", nn.RNN: "DPRNN"}


def refuse_complex(name: str, param: nn.Parameter) -> None:
    """Raise ``FlashClippingError`` for a trainable parameter that is complex."""
    if param.requires_grad and param.is_complex():
        raise FlashClippingError(
            f"{name}: a complex parameter ({param.dtype}), whose clipped gradients and noise are "
            "not supported. Keep its real and imaginary parts in a real parameter, "
            "nn.Parameter(torch.view_as_real(w)), and use torch.view_as_complex(self.w) in "
            f"forward, which is exact; or freeze it.{to_freeze_parameters(name)}"
        )


def refuse_unsupported(root: nn.Module) -> None:
    """Refuse a model that is about to be wrapped: in which a layer mixes samples, has parameters
    without a shape, reduces gradients itself, or reads its parameters past any tap; or a trainable
    parameter is complex."""
    refuse_max_norm(embeddings_of(root))
    refuse_sharding(root)
    refuse_batch_norms(batch_norms_of(root))
    for name, param in root.named_parameters():
        refuse_complex(name, param)
    for path, module in root.named_modules():
        for name, param in module._parameters.items():
            if param is not None and is_lazy(param):
                raise NotImplementedError(
                    f"{path or 'the model'} ({type(module).__name__}): its parameter {name!r} has "
                    "no shape before the first forward, so nothing can be clipped or trained. Call "
                    "the model once on a batch, then make the optimizer and wrap the model."
                    "\n    with torch.no_grad(): model(x)"
                )
        _refuse_hooked(path, module)
        refuse_inside(path, module)
        if type(module) in _REPLACED_LAYERS:
            raise NotImplementedError(
                f"{path} ({type(module).__name__}) has no per-sample gradients. Replace it by "
                f"opacus.layers.{_REPLACED_LAYERS[type(module)]}, which takes its state dict:"
                "\n    import opacus; model = opacus.validators.ModuleValidator.fix(model)"
            )


def batch_norms_of(root: nn.Module) -> list[tuple[str, Any]]:
    """The batch normalizations in a model, by path."""
    return [(path, m) for path, m in root.named_modules() if isinstance(m, BATCH_NORMS)]


def refuse_batch_norms(norms: Iterable[tuple[str, Any]]) -> None:
    """Raise ``NotImplementedError`` for those of these batch normalizations, by path, that read
    statistics of the batch now. In eval mode, with running statistics, the output for a sample is
    of that sample alone."""
    for path, module in norms:
        if module.training or module.running_mean is None or module.running_var is None:
            raise NotImplementedError(
                f"{path or 'the model'} ({type(module).__name__}) mixes samples: the gradient of "
                "one sample depends on the others, so no clipping can bound it. Replace it by "
                "nn.GroupNorm (opacus.validators.ModuleValidator.fix(model) does). With running "
                "statistics, of public data, it may stay as it is in eval mode; after every "
                f"model.train():\n    {module_at(path)}.eval()"
            )


def _refuse_hooked(path: str, module: nn.Module) -> None:
    """Refuse a trainable weight that a hook of ``torch.nn.utils`` computes before the forward."""
    before_forward: Any = hooks_of_module(module)[0]
    for hook in before_forward.values() if isinstance(before_forward, dict) else ():
        name = getattr(hook, "_tensor_name" if isinstance(hook, _Pruning) else "name", "")
        kind = _COMPUTING_HOOKS.get(type(hook))
        sources = [module._parameters.get(f"{name}{end}") for end in ("_orig", "_g", "_v")]
        if not any(source is not None and source.requires_grad for source in sources):
            continue
        if isinstance(hook, _Pruning):
            kind = "prune"
            line = f'torch.nn.utils.prune.remove({module_at(path)}, "{name}")'
        elif kind is None:
            continue
        else:
            line = f"layer = {module_at(path)}; torch.nn.utils.remove_{kind}(layer); "
            line += f"torch.nn.utils.parametrizations.{kind}(layer)"
        raise NotImplementedError(
            f"{path or 'the model'} ({type(module).__name__}): its {name} is computed by a hook "
            f"(torch.nn.utils.{kind}) before the layer runs, so what it is computed from has no "
            "per-sample gradients; expected a parametrization (exact), or a plain parameter:\n"
            f"    {line}"
        )


def validate(module: nn.Module) -> None:
    """Opacus' validation, but for ``nn.MultiheadAttention``, which is served as it is."""
    # Only Opacus' verdict on this one type is left out; everything else is Opacus' to say.
    with without_validator(nn.MultiheadAttention):
        ModuleValidator.validate(module, strict=True)
