"""Private interfaces of PyTorch, Triton and Opacus: all of them that are used here.

Other versions may lack any of these. Each has a line that says what it is for, and what happens
without it. Either the rest works as before, or more slowly; or the first use raises
:class:`MissingInterface`. No norm is ever wrong for it, and ``import flash_clipping`` works.

Names are bound once, on import, so that a layer pays for none of this. Triton and Opacus are
imported by those who ask. ``docs/versions.md`` has the versions that tests ran with.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint

#: Versions that have all of this: tests ran with the first and the last.
KNOWN = {"PyTorch": "2.7 to 2.15", "Triton": "3.3 to 3.9", "Opacus": "1.6"}


class MissingInterface(ImportError):
    """A private interface that has no substitute is not in the installed version."""


def _refuse(name: str, package: str = "PyTorch") -> NoReturn:
    raise MissingInterface(
        f"flash_clipping needs {name}, which the installed {package} does not have. Known to work: "
        f"{package} {KNOWN[package]}."
    )


def _find(holder: Any, path: str) -> Any:
    """What is at this dotted path, or ``None``."""
    for name in path.split("."):
        holder = getattr(holder, name, None)
    return holder


def _module(name: str) -> Any:
    """A module, or ``None``."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _needed(path: str) -> Any:
    """What is at this dotted path in PyTorch, or what raises when it is called."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        _refuse(f"torch.{path}")

    return _find(torch, path) or refuse


# -- autograd's engine ---------------------------------------------------------------------------

#: Number of the backward that runs in this thread, or -1. Without: an error.
graph_task: Callable[[], int] = _needed("_C._current_graph_task_id")

#: Calls a function when the running backward is through. Without: an error.
at_end_of_backward: Callable[[Callable[[], None]], None] = _needed(
    "autograd.Variable._execution_engine.queue_callback"
)

#: Whether the running backward was asked to come by a node. Without: an error.
will_run: Callable[[Any], bool] = _needed("_C._will_engine_execute_node")

#: Whether that can be told. Without: the hooks of parameters tell, and ``mode="two_pass"`` gives
#: no gradients of the model's inputs.
TELLS_WHAT_RUNS: bool = _find(torch, "_C._will_engine_execute_node") is not None

#: Whether a transform of torch.func runs. Without: PyTorch refuses our functions there by itself.
transforms_are_active: Callable[[], bool] = _find(torch, "_C._are_functorch_transforms_active") or (
    lambda: False
)


def apply_of(function: type[torch.autograd.Function]) -> Any:
    """``function.apply`` without its look at transforms, for who has looked. Without: with it."""
    if _find(torch, "_C._are_functorch_transforms_active") is None:
        return function.apply
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def _saved_tensors_hooks() -> Callable[[], Any]:
    find = _find(torch, "_C._autograd._top_saved_tensors_default_hooks")
    try:
        find(True)
    except (TypeError, AttributeError, RuntimeError):
        return object
    return partial(find, True)


#: The hooks for saved tensors that are in force. Without: never twice the same, as if a checkpoint
#: had come between.
saved_tensors_hooks_now: Callable[[], Any] = _saved_tensors_hooks()


def has_lasting_node(param: Tensor) -> bool:
    """Whether somebody holds autograd's node of a parameter, on which marks last as long as it
    does. Without: yes, which keeps steps from being captured."""

    def marks() -> Any:
        node: Any = torch.autograd.graph.get_gradient_edge(param).node
        return getattr(node, "metadata", None)

    if (first := marks()) is None:
        return True
    first[has_lasting_node] = True
    del first
    return has_lasting_node in marks()


# -- the compiler --------------------------------------------------------------------------------


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


def is_traced_once() -> bool:
    """Whether what Dynamo traces now will run as often as it is traced: not in the body of an
    operator that may run it several times, or not. Without: no."""
    find = _find(_module("torch._dynamo.symbolic_convert"), "InstructionTranslator.current_tx")
    try:
        tracer = find().output.current_tracer
        while tracer.parent is not None:
            target = tracer.source_target
            name = target if isinstance(target, str) else str(getattr(target, "_name", target))
            if "checkpoint" not in name and "autograd" not in name.lower():
                return False
            tracer = tracer.parent
    except (AttributeError, TypeError):
        return False
    return True


# -- tensors and their memory --------------------------------------------------------------------

#: What tells one storage from another. Without: its memory's address.
memory_id: Callable[[torch.UntypedStorage], int] = (
    attrgetter("_cdata")
    if hasattr(torch.UntypedStorage, "_cdata")
    else torch.UntypedStorage.data_ptr
)


def _count_of_references() -> Callable[[int], int]:
    count = _find(torch, "_C._storage_Use_Count")
    if count is None or not hasattr(torch.UntypedStorage, "_cdata"):
        return lambda _: sys.maxsize
    return count  # type: ignore[no-any-return]


#: References to a storage, which is given by its ``memory_id``. Without: many, so that no
#: graph is replayed.
references_to: Callable[[int], int] = _count_of_references()


def _same_memory(x: Tensor, y: Tensor) -> bool:
    try:
        return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return True


#: Whether two tensors share a storage. Without: whether these begin at one address.
is_alias_of: Callable[[Tensor, Tensor], bool] = _find(torch, "_C._is_alias_of") or _same_memory


#: Keeps a storage's id from being used again, not its memory. Without: its memory as well.
weak_storage: Callable[[torch.UntypedStorage], Any] = _find(
    _module("torch.multiprocessing.reductions"), "StorageWeakRef"
) or (lambda storage: storage)

#: Context: torch functions see subclasses as plain tensors. Without: an error.
plain_functions: Callable[[], Any] = _needed("_C.DisableTorchFunctionSubclass")


def _as_subclass(cls: type[Tensor], data: Tensor, requires_grad: bool) -> Any:
    with plain_functions():
        return data.detach().as_subclass(cls).requires_grad_(requires_grad)


#: A tensor of a subclass, of the same memory. Without: by way of ``as_subclass``.
make_subclass: Callable[[Any, Tensor, bool], Any] = (
    _find(torch, "Tensor._make_subclass") or _as_subclass
)


# -- what runs models and looks at them ----------------------------------------------------------


class _NoPytree:
    def __getattr__(self, name: str) -> NoReturn:
        _refuse(f"torch.utils._pytree.{name}")


#: Tensors in nested arguments: a module. Without: an error.
pytree: Any = _module("torch.utils._pytree") or _NoPytree()


class _NoDispatchMode:
    def __init__(self, *_: Any) -> None:
        _refuse("torch.utils._python_dispatch.TorchDispatchMode")


#: Base class of what sees every operator that runs. Without: an error.
DispatchMode: Any = (
    _find(_module("torch.utils._python_dispatch"), "TorchDispatchMode") or _NoDispatchMode
)


def arguments_of(operator: Any) -> Sequence[str]:
    """Names of an operator's arguments. Without: none; what is found by them stays as it is."""
    schema = getattr(operator, "_schema", None)
    return () if schema is None else [argument.name for argument in schema.arguments]


def _any_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


#: Whether autocast is on, on any device. Without: on a CPU or an NVIDIA GPU.
is_autocasting: Callable[[], bool] = _find(torch, "_C._is_any_autocast_enabled") or _any_autocast


@contextmanager
def checkpoints_replaced(by: Any) -> Iterator[None]:
    """Another function in the place of re-entrant checkpoints. Without: none, so layers in such
    checkpoints are refused where it matters what they read."""
    before = getattr(checkpoint, "CheckpointFunction", None)
    if before is None:
        yield
        return
    setattr(checkpoint, "CheckpointFunction", by)  # noqa: B010 (mypy sees a type)
    try:
        yield
    finally:
        setattr(checkpoint, "CheckpointFunction", before)  # noqa: B010


# -- torch.compile --------------------------------------------------------------------------------


def constant_in_traces(function: Callable[..., Any]) -> Any:
    """Marks what runs while a compiler traces, its result a constant, as the public decorator does,
    which imports the compiler. Without: it is traced, which breaks the graph there."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


#: Keeps the compiler out of a function, without importing it. Without: the public decorator, which
#: imports it.
never_compiled: Callable[[Callable[..., Any]], Any] = (
    _find(torch, "_compile._disable_dynamo") or torch.compiler.disable
)

#: The compiler's trace that runs now, or ``None``. Without: ``None``, so that compiled layers are
#: tapped one by one.
tracing_context: Callable[[], Any] = _find(_module("torch._guards"), "TracingContext.try_get") or (
    lambda: None
)


@constant_in_traces
def is_autograd_compiled() -> bool:
    """Whether backward passes are compiled (compiled autograd) now. Without: not noticed before
    norms are missing."""
    found = sys.modules.get("torch._dynamo.compiled_autograd")  # who has not imported it has not
    names = ("compiled_autograd_enabled", "in_compiled_autograd_region")
    return found is not None and any(bool(getattr(found, name, False)) for name in names)


def is_fake(x: Any) -> bool:
    """Whether a tensor only stands for one, while a graph is traced. Without: no."""
    found = _find(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor")
    return found is not None and isinstance(x, found)


def is_compilers_error(error: BaseException) -> bool:
    """Whether Dynamo raised this while it traced. Without: no."""
    found = _find(sys.modules.get("torch._dynamo.exc"), "TorchDynamoException")
    return found is not None and isinstance(error, found)


def _is_of_compiler(thing: Any, kind: str) -> bool:
    compiler = sys.modules.get("torch._dynamo")  # who has not imported it has compiled nothing
    found = _find(compiler, f"eval_frame.{kind}")
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


# -- modules -------------------------------------------------------------------------------------

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

#: A module's hooks, kind by kind. Without: others at every look, so that no graph is replayed.
hooks_of_module: Callable[[nn.Module], Sequence[Any]] = (
    attrgetter(*_HOOKS)
    if all(hasattr(nn.Module(), name) for name in _HOOKS)
    else lambda _: [[object()]]
)

#: A parameter's hooks, or ``None``. Without: others at every look, so that no graph is replayed.
hooks_of_parameter: Callable[[Tensor], Any] = (
    attrgetter("_backward_hooks") if hasattr(Tensor, "_backward_hooks") else lambda _: [object()]
)

#: All kinds of batch normalization. Without: those that PyTorch has now.
BATCH_NORMS: tuple[type[nn.Module], ...] = (
    _find(nn, "modules.batchnorm._BatchNorm") or nn.BatchNorm1d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
)

#: All kinds of dropout. Without: those that PyTorch has now.
DROPOUTS: tuple[Any, ...] = (
    _find(nn, "modules.dropout._DropoutNd") or nn.Dropout,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def padding_of(layer: Any) -> list[int]:
    """A convolution's padding as ``F.pad`` takes it. Without: computed from what is public."""
    known = getattr(layer, "_reversed_padding_repeated_twice", None)
    if known is not None:
        return list(known)
    found: list[int] = []
    for axis in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            found += [total // 2, total - total // 2]
        else:
            found += [0 if layer.padding == "valid" else layer.padding[axis]] * 2
    return found


def lacks_batch_axis(layer: Any, x: Tensor) -> bool:
    """Whether an instance normalization was given one sample without its axis. Without: by type.

    Raises:
        ValueError: or what has neither as many axes as a sample nor as a batch.
    """
    check, alone = (getattr(layer, n, None) for n in ("_check_input_dim", "_get_no_batch_dim"))
    if check is not None and alone is not None:
        check(x)
        return bool(x.dim() == alone())
    kinds = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    axes = next(axes for axes, kind in enumerate(kinds, 2) if isinstance(layer, kind))
    if x.dim() not in (axes, axes + 1):
        raise ValueError(f"expected {axes}D or {axes + 1}D input (got {x.dim()}D input)")
    return x.dim() == axes


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor | None]:
    return F.rms_norm(x, [*shape], weight, eps), None


def _fused_rms_norm() -> Any:
    operator = _find(torch.ops.aten, "_fused_rms_norm.default")
    schema = getattr(operator, "_schema", None)
    if schema is None or len(schema.returns) != 2:
        return _rms_norm
    names = [argument.name for argument in schema.arguments]
    return operator if names == ["input", "normalized_shape", "weight", "eps"] else _rms_norm


#: Output and reciprocal root mean square of RMSNorm. Without (before PyTorch 2.9): the output, and
#: ``None``, which the rule then computes.
rms_norm: Callable[..., tuple[Tensor, Tensor | None]] = _fused_rms_norm()


# -- data parallelism ----------------------------------------------------------------------------


def runs_in_ddp() -> bool:
    """Whether a DistributedDataParallel's forward runs. Without: an error where processes were
    started."""
    kind = nn.parallel.DistributedDataParallel
    if hasattr(kind, "_active_ddp_module"):
        return kind._active_ddp_module is not None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _refuse("torch.nn.parallel.DistributedDataParallel._active_ddp_module")
    return False


def is_replica(module: nn.Module) -> bool:
    """Whether DataParallel made this module. Without: its parameters are no leaves, and refused."""
    return bool(getattr(module, "_is_replica", False))


def is_flattened(param: Tensor) -> bool:
    """Whether FSDP has made it a part of a flat parameter. Without: it is no ``nn.Parameter``."""
    return bool(getattr(param, "_fsdp_flattened", False))


def awaits_gradient(param: Tensor) -> bool:
    """Whether a hook waits until autograd has accumulated a gradient, which never happens here.
    Without: not noticed; such hooks do not run."""
    return bool(getattr(param, "_post_accumulate_grad_hooks", None))


def applied_to(module: nn.Module) -> Sequence[str]:
    """Composable functions of torch.distributed that were applied. Without: not noticed before the
    module's class is changed."""
    registry = _find(_module("torch.distributed._composable"), "_get_registry")
    return () if registry is None else tuple(registry(module) or ())


# -- Opacus --------------------------------------------------------------------------------------


def _check_unused(summed: Any) -> None:
    if hasattr(summed, "_processed"):
        raise ValueError(
            "A gradient was used in an optimizer's step already. Call optimizer.zero_grad() after "
            "every step."
        )


def _mark_used(summed: Any) -> None:
    summed._processed = True


def _draw(std: float, reference: Tensor, generator: Any = None, secure_mode: bool = False) -> Any:
    if secure_mode:
        _refuse("opacus.optimizers.optimizer._generate_noise in secure mode", "Opacus")
    if std == 0:
        return torch.zeros_like(reference)
    return torch.normal(
        0.0,
        std,
        reference.shape,
        generator=generator,
        device=reference.device,
        dtype=reference.dtype,
    )


def functions_of_optimizer() -> tuple[Any, Any, Any]:
    """Of Opacus: refuses sums that a step has used, marks them, draws noise. Without: the same
    here, and an error in secure mode."""
    from opacus.optimizers import optimizer

    return (
        getattr(optimizer, "_check_processed_flag", _check_unused),
        getattr(optimizer, "_mark_as_processed", _mark_used),
        getattr(optimizer, "_generate_noise", _draw),
    )


def check_optimizer(optimizer: Any) -> None:
    """Attributes of Opacus' optimizer, by which skipped steps are known. Without: an error."""
    for name in ("_step_skip_queue", "_is_last_step_skipped"):
        if not hasattr(optimizer, name):
            _refuse(f"opacus.optimizers.DPOptimizer.{name}", "Opacus")


def check_engine(engine: type) -> None:
    """Methods of Opacus' engine that are overridden. Without: an error."""
    for name in ("_model", "_data_loader", "_optimizer", "_criterion"):
        if not hasattr(engine, f"_prepare{name}"):
            _refuse(f"opacus.PrivacyEngine._prepare{name}", "Opacus")


@contextmanager
def without_validator(kind: type[nn.Module]) -> Iterator[None]:
    """Opacus' validation without its verdict on one type. Without: with it."""
    from opacus.validators import ModuleValidator

    validators = getattr(ModuleValidator, "VALIDATORS", {})
    verdict = validators.pop(kind, None)
    try:
        yield
    finally:
        if verdict is not None:
            validators[kind] = verdict


# -- Triton --------------------------------------------------------------------------------------


def compiled_kernel() -> Any:
    """Type of a compiled kernel, which is started by ``kernel[grid](*addresses)``. Without:
    ``None``, and Triton looks for the kernel at every launch."""
    found = _find(_module("triton.compiler"), "CompiledKernel")
    return found if hasattr(found, "__getitem__") else None


def early_start() -> tuple[Any, Any]:
    """Functions that let the next kernel begin, and wait for the one before. Without: ``None``, and
    kernels begin one after the other."""
    cuda = _find(_module("triton.language"), "extra.cuda")
    names = ("gdc_launch_dependents", "gdc_wait")
    launch, wait = (getattr(cuda, name, None) for name in names)
    return (launch, wait) if launch is not None and wait is not None else (None, None)


@cache
def gluon() -> SimpleNamespace | None:
    """What kernels in Gluon, Triton's lower language, are written with. Without: ``None``, and
    kernels in Triton run in their place."""
    try:
        language = importlib.import_module("triton.experimental.gluon.language")
        hopper = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
        tma = hopper.tma
        return SimpleNamespace(
            jit=importlib.import_module("triton.experimental.gluon").jit,
            language=language,
            fence_async_shared=hopper.fence_async_shared,
            mbarrier=hopper.mbarrier,
            tma=tma,
            load_async=getattr(tma, "async_load", None) or tma.async_copy_global_to_shared,  # 3.7
            warpgroup_mma=hopper.warpgroup_mma,
            warpgroup_mma_wait=hopper.warpgroup_mma_wait,
        )
    except (ImportError, AttributeError):
        return None
