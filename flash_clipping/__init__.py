"""Differentially private training at the speed of training without it, as an Opacus plugin."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flash_clipping.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """At first use all names come, and PyTorch, which ``flash-clipping --help`` does without
        (PEP 562)."""
        if name == "__all__" or not name.startswith("__"):
            try:
                public = import_module("flash_clipping.public")
            except AttributeError as error:  # which "from" takes for that of a name
                raise ImportError(f"flash_clipping: {error}") from error
            wings = "hugging_face", "layers", "noise", "one_by_one"
            names = [one for one in vars(public) if one[0] != "_" and one not in wings]
            globals().update({one: getattr(public, one) for one in names}, __all__=sorted(names))
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
