"""A wrapped model answers as the model does: attributes, methods, state dicts of either form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

#: State dicts of a wrapped model put this before every name, as Opacus' do.
PREFIX = "_module."

#: Set on the model and on the wrapper, each its own.
_OF_BOTH = "autograd_grad_sample_hooks"


class ModuleProxy(nn.Module):
    """Hands on to ``self._module`` what a wrapper has not itself.

    Reading: the wrapper's own attributes, then modules by their path (as in Opacus), then those of
    the model: ``config``, ``device``, ``generate``. Setting an attribute that only the model has
    sets the model's. What Python looks up on the class (``len``, indexing) is the wrapper's.
    """

    _module: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("_module")
            # copy and pickle ask for names like these; the model's would copy the model alone.
            if model is None or (name.startswith("__") and name.endswith("__")):
                raise
        try:
            return getattr(model, name)
        except AttributeError as error:
            kinds = f"{type(self).__name__} around {type(model).__name__}"
            raise AttributeError(f"{kinds} has no attribute {name!r}") from error

    def __setattr__(self, name: str, value: Any) -> None:
        model = self.__dict__.get("_modules", {}).get("_module")
        # The model has the wrapper's hooks only after its construction: until then all is its own.
        if (
            model is not None
            and self.__dict__.get("_constructed")
            and not name.startswith("_")
            and name != _OF_BOTH
            and not self._has_itself(name)
            and hasattr(model, name)
        ):
            setattr(model, name, value)
            return
        super().__setattr__(name, value)

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *dir(self._module)})  # type: ignore[no-untyped-call]

    def _has_itself(self, name: str) -> bool:
        own = self.__dict__
        parts = own["_parameters"], own["_buffers"], own["_modules"]
        return name in own or hasattr(type(self), name) or any(name in each for each in parts)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As of any module, for state dicts of wrapped models, whose names begin with ``_module.``,
        and of plain ones; missing and unexpected keys are then named as in the model."""
        plain = self._module.state_dict(keep_vars=True)
        if any(key in plain for key in state_dict) and not any(
            key.startswith(PREFIX) and key.removeprefix(PREFIX) in plain for key in state_dict
        ):
            return self._module.load_state_dict(state_dict, *args, **kwargs)
        return super().load_state_dict(state_dict, *args, **kwargs)
