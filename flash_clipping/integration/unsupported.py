"""Layers and parameters that no clipping can bound, or that no tap can serve."""

from __future__ import annotations

from opacus.validators import ModuleValidator
from torch import nn
from torch.nn.parameter import is_lazy

from flash_clipping._compat import BATCH_NORMS, without_validator
from flash_clipping.capture.max_norm import embeddings_of, refuse_max_norm
from flash_clipping.errors import FlashClippingError
from flash_clipping.integration.parallel import refuse_inside
from flash_clipping.sharded import refuse_sharding

#: Layers whose output for one sample depends on the others.
_MIXING_LAYERS = BATCH_NORMS

#: Layers that read their parameters past any stand-in, and what to use instead.
_REPLACED_LAYERS = {nn.LSTM: "DPLSTM", nn.GRU: "DPGRU", nn.RNN: "DPRNN"}


def refuse_complex(name: str, param: nn.Parameter) -> None:
    """Refuse a trainable parameter that is complex.

    Raises:
        FlashClippingError: it is.
    """
    if param.requires_grad and param.is_complex():
        raise FlashClippingError(
            f"{name}: a complex parameter ({param.dtype}), whose clipped gradients and noise are "
            "not supported. Keep its real and imaginary parts in a real parameter, "
            "nn.Parameter(torch.view_as_real(w)), and use torch.view_as_complex(self.w) in "
            "forward, which is exact; or freeze it (requires_grad_(False))."
        )


def refuse_unsupported(root: nn.Module) -> None:
    """Refuse a model that is about to be wrapped.

    Raises:
        NotImplementedError: a layer mixes samples, has parameters without a shape, reduces
            gradients itself, or reads its parameters past any tap.
        FlashClippingError: a trainable parameter is complex.
    """
    refuse_max_norm(embeddings_of(root))
    refuse_sharding(root)
    for name, param in root.named_parameters():
        refuse_complex(name, param)
    for path, module in root.named_modules():
        for name, param in module._parameters.items():
            if param is not None and is_lazy(param):
                raise NotImplementedError(
                    f"{path or 'the model'} ({type(module).__name__}): its parameter {name!r} has "
                    "no shape before the first forward, so nothing can be clipped or trained. Call "
                    "the model once on a batch (under torch.no_grad()), then make the optimizer "
                    "and wrap the model."
                )
        if isinstance(module, _MIXING_LAYERS):
            raise NotImplementedError(
                f"{path} ({type(module).__name__}) mixes samples: the gradient of one sample "
                "depends on the others, so no clipping can bound it. Replace it by "
                "nn.GroupNorm (opacus.validators.ModuleValidator.fix(model) does)."
            )
        refuse_inside(path, module)
        if type(module) in _REPLACED_LAYERS:
            raise NotImplementedError(
                f"{path} ({type(module).__name__}) has no per-sample gradients. Replace it by "
                f"opacus.layers.{_REPLACED_LAYERS[type(module)]}, which takes its state dict "
                "(opacus.validators.ModuleValidator.fix(model) does)."
            )


def validate(module: nn.Module) -> None:
    """Opacus' validation, but for ``nn.MultiheadAttention``, which is served as it is."""
    # Only Opacus' verdict on this one type is left out; everything else is Opacus' to say.
    with without_validator(nn.MultiheadAttention):
        ModuleValidator.validate(module, strict=True)
