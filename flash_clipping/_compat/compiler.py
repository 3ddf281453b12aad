"""``torch.compile``: what it traces, and what it has made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from flash_clipping._compat.lookup import find, load


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Let ``torch.compiler.is_compiling`` say yes: a model that asks for it then takes the way that
    it takes when it is compiled. Without: it takes the other."""
    before = getattr(torch.compiler, "_is_compiling_flag", None)
    if before is None:
        yield
        return
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def backward_runs_again() -> AbstractContextManager[Any]:
    """What is compiled inside keeps the tensors that its backward reads, which runs several times.
    Without: an error of PyTorch's in the second run, where it would reuse their memory."""
    patch = find(load("torch._functorch.config"), "patch")
    return nullcontext() if patch is None else patch(donated_buffer=False)


def is_traced_once() -> bool:
    """Whether what Dynamo traces now will run as often as it is traced: not in the body of an
    operator that may run it several times, or not. Without: no."""
    tracer_now = find(load("torch._dynamo.symbolic_convert"), "InstructionTranslator.current_tx")
    try:
        tracer = tracer_now().output.current_tracer
        while tracer.parent is not None:
            target = tracer.source_target
            name = target if isinstance(target, str) else str(getattr(target, "_name", target))
            if "checkpoint" not in name and "autograd" not in name.lower():
                return False
            tracer = tracer.parent
    except (AttributeError, TypeError):
        return False
    return True


def constant_in_traces(function: Callable[..., Any]) -> Any:
    """Marks what runs while a compiler traces, its result a constant, as the public decorator does,
    which imports the compiler. Without: it is traced, which breaks the graph there."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


#: Keeps the compiler out of a function, without importing it. Without: the public decorator, which
#: imports it.
never_compiled: Callable[[Callable[..., Any]], Any] = (
    find(torch, "_compile._disable_dynamo") or torch.compiler.disable
)

#: The compiler's trace that runs now, or ``None``. Without: ``None``, so that compiled layers are
#: tapped one by one.
tracing_context: Callable[[], Any] = find(load("torch._guards"), "TracingContext.try_get") or (
    lambda: None
)


@constant_in_traces
def is_autograd_compiled() -> bool:
    """Whether backward passes are compiled (compiled autograd) now. Without: not noticed before
    norms are missing."""
    found = sys.modules.get("torch._dynamo.compiled_autograd")  # who has not imported it has not
    return found is not None and bool(
        getattr(found, "compiled_autograd_enabled", False)
        or getattr(found, "in_compiled_autograd_region", False)
    )


def is_fake(x: Any) -> bool:
    """Whether a tensor only stands for one, while a graph is traced. Without: no."""
    found = find(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor")
    return found is not None and isinstance(x, found)


def is_compilers_error(error: BaseException) -> bool:
    """Whether Dynamo raised this while it traced. Without: no."""
    found = find(sys.modules.get("torch._dynamo.exc"), "TorchDynamoException")
    return found is not None and isinstance(error, found)


def _is_of_compiler(thing: Any, kind: str) -> bool:
    compiler = sys.modules.get("torch._dynamo")  # who has not imported it has compiled nothing
    found = find(compiler, f"eval_frame.{kind}")
    return found is not None and isinstance(thing, found)


def is_compiled(module: Any) -> bool:
    """Whether ``torch.compile`` made this module. Without: not noticed, and it runs as compiled."""
    return _is_of_compiler(module, "OptimizedModule") and hasattr(module, "_orig_mod")


def compiles(thing: Any) -> bool:
    """Whether ``torch.compile`` made functions with this. Without: not noticed; they run as they
    were compiled."""
    return _is_of_compiler(thing, "OptimizeContext")


def call_of(module: Any) -> Any:
    """A module's call with its hooks, past what was compiled. Without: ``None``."""
    return module._orig_mod.__call__ if is_compiled(module) else getattr(module, "_call_impl", None)
