"""Private interfaces of PyTorch, Triton and Opacus: all of them that are used here.

Other versions may lack any of these. Each has a line that says what it is for, and what happens
without it. What all tested versions have is needed: without it an import, or the first use, raises
:class:`MissingInterface`. What some of them lack has a substitute. No norm is ever wrong for it.

Names are bound once, on import, so that a layer pays for none of this. ``docs/versions.md`` has the
versions that tests ran with.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache, partial
from operator import attrgetter
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import checkpoint

from flash_clipping.errors import NamesItsPage

# -- how an interface is looked for, and what is said where it is missing --------------------------

#: Versions that have all of this: tests ran with the first and the last.
KNOWN = {"PyTorch": "2.11 to 2.15", "Triton": "3.6 to 3.9", "Opacus": "1.6"}


class MissingInterface(NamesItsPage, ImportError):
    """A private interface that has no substitute is not in the installed version."""


def _refuse(name: str, *_: Any, package: str = "PyTorch", **__: Any) -> NoReturn:
    """Say that this private name is needed and missing."""
    raise MissingInterface(
        f"FC941 flash_clipping needs {name}, which the installed {package} does not have. Known to "
        f"work: {package} {KNOWN[package]}."
    )


def _find(holder: Any, path: str) -> Any:
    """What is at this dotted path, or ``None``."""
    for name in path.split("."):
        holder = getattr(holder, name, None)
    return holder


def _load(name: str) -> Any:
    """A module, or ``None``."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _attribute(holder: Any, name: str, package: str = "PyTorch") -> Any:
    """A private attribute that has no substitute."""
    if not hasattr(holder, name):
        kind = holder if isinstance(holder, type | ModuleType) else type(holder)
        _refuse(f"{kind.__name__}.{name}", package=package)
    return getattr(holder, name)


def _needed(path: str) -> Any:
    """What is at this dotted path in PyTorch, or what raises when it is called."""
    return _find(torch, path) or partial(_refuse, f"torch.{path}")


def _getter(holder: Any, *names: str) -> Any:
    """Reads these attributes, which things like this one have."""
    for name in names:
        _attribute(holder, name)
    return attrgetter(*names)


@contextmanager
def _replaced(holder: Any, name: str, by: Any) -> Iterator[None]:
    """Something else in the place of this attribute."""
    before = _attribute(holder, name)
    setattr(holder, name, by)
    try:
        yield
    finally:
        setattr(holder, name, before)


# -- tensors: memory, subclasses, operators, containers --------------------------------------------

#: What tells one storage from another. Without: an error on import.
memory_id: Callable[[torch.UntypedStorage], int] = _getter(torch.UntypedStorage, "_cdata")

#: References to a storage, which is given by its ``memory_id``. Without: an error.
references_to: Callable[[int], int] = _needed("_C._storage_Use_Count")


def let_memory_grow() -> None:
    """Let PyTorch's memory of a GPU grow in place, unless the environment says how it is managed:
    batches of ever new sizes would leave holes. Without: nothing."""
    told = os.getenv("PYTORCH_CUDA_ALLOC_CONF") or os.getenv("PYTORCH_ALLOC_CONF")
    setting = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if setting is not None and torch.cuda.is_available() and not told:
        setting("expandable_segments:True")


def end_failed_capture(device: torch.device, pool: Any) -> None:
    """Tell a GPU's allocator and generator that a capture which failed is over: PyTorch tells them
    of others only, and nothing could be drawn at random any more. Without: nothing."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    release = getattr(torch._C, "_cuda_releasePool", None)
    if end is None or release is None:
        return
    try:
        end(device.index, pool)
    except RuntimeError:
        return  # it has ended: what failed was no launch
    release(device.index, pool)
    small = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed")
    with torch.cuda.device(device), small:  # the generator ends with a capture that succeeds
        torch.empty(1, device=device).zero_()


def borrowed(tensor: Tensor) -> Tensor:
    """A tensor in the same memory of a GPU that does not keep it: a CUDA graph's memory, which the
    next capture may take. Without: the tensor itself, whose memory is kept."""
    of_address = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if of_address is None or not tensor.is_cuda:
        return tensor
    memory = tensor.untyped_storage()
    held = of_address(memory.data_ptr(), tensor.device, memory.nbytes())
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(held, tensor.storage_offset(), tensor.size(), tensor.stride())


#: Copies tensors into others, ``copy_all(into, tensors)``, in a few launches. Without: an error.
copy_all: Callable[[list[Tensor], list[Tensor]], None] = _needed("_foreach_copy_")

#: Adds tensors to others, ``add_all(to, tensors)``, in a few launches. Without: an error.
add_all: Callable[[list[Tensor], list[Tensor]], None] = _needed("_foreach_add_")

#: Whether two tensors share a storage. Without: an error.
is_alias_of: Callable[[Tensor, Tensor], bool] = _needed("_C._is_alias_of")

_TensorGuards = _needed("_C._dynamo.guards.TensorGuards")


def laid_out_like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Tells whether as many other tensors agree with these in dtype, shape, strides and device; it
    holds none. Each is given once. Without: an error."""
    guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: Callable[..., bool] = guards.check
    return check


#: Context: torch functions see subclasses as plain tensors. Without: an error.
plain_functions: Callable[[], Any] = _needed("_C.DisableTorchFunctionSubclass")

#: Contexts: functions, and operators, of plain tensors are seen by no mode. Without: an error.
unseen_functions: Callable[[], Any] = _needed("_C.DisableTorchFunction")
unseen_operators: Callable[[], Any] = _needed("_C._DisableTorchDispatch")

#: A tensor of a subclass, of the same memory. Without: an error.
make_subclass: Callable[[Any, Tensor, bool], Any] = _needed("Tensor._make_subclass")


#: Tensors in nested arguments: a module. Without: an error on import.
pytree: Any = _attribute(torch.utils, "_pytree")

#: Base class of what sees every operator that runs. Without: an error on import.
DispatchMode: Any = _attribute(_attribute(torch.utils, "_python_dispatch"), "TorchDispatchMode")


def arguments_of(operator: Any) -> Sequence[str]:
    """Names of an operator's arguments. Without: none; what is found by them stays as it is."""
    schema = getattr(operator, "_schema", None)
    return () if schema is None else [argument.name for argument in schema.arguments]


_grouped_mm = _find(torch, "nn.functional.grouped_mm")

#: From so many runs on, PyTorch's grouped products refuse.
_GROUPS = 1024


def grouped_mm(X: Tensor, Y: Tensor, runs: int) -> Callable[..., Tensor] | None:
    """PyTorch's products of runs of rows with a matrix each, or of runs of columns with runs of
    rows, for these operands. Without, and for operands it does not take: ``None``, and a kernel of
    ours runs."""
    if _grouped_mm is None or runs >= _GROUPS or not X.is_cuda or torch.version.hip is not None:
        return None
    if X.dtype != torch.bfloat16 or Y.dtype != torch.bfloat16:
        return None
    major = torch.cuda.get_device_capability(X.device)[0]
    # Blackwell leaves what it found in the product of a run without rows (pytorch#172439), and a
    # unit's gradient would be another's.
    if major < 9 or (major > 9 and X.dim() == Y.dim() == 2):
        return None
    return _grouped_mm if _is_on_16_bytes(X) and _is_on_16_bytes(Y) else None


def _is_on_16_bytes(x: Tensor) -> bool:
    """Whether features, or rows, lie next to each other, and begin on 16 bytes."""
    *outer, rows, columns = x.stride()
    apart = rows if columns == 1 else columns if rows == 1 else 1
    each = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(n > 0 and n % each == 0 for n in (*outer, apart))


# -- autograd: the running pass, functions, hooks, autocast, checkpoints ---------------------------

#: Number of the backward that runs in this thread, or -1. Without: an error.
graph_task: Callable[[], int] = _needed("_C._current_graph_task_id")

_run_backward = _find(torch, "autograd.graph._engine_run_backward")


def roots_of_backward(thread: int) -> Sequence[Any]:
    """The tensors that the running backward, which this thread has called, began at. Without:
    none."""
    code = getattr(_run_backward, "__code__", None)
    frame = sys._current_frames().get(thread)  # autograd's own threads have no frames above
    while frame is not None:
        if frame.f_code is code:
            found: Sequence[Any] = frame.f_locals.get("t_outputs", ())
            return found
        frame = frame.f_back
    return ()


def shape_of_result(node: Any, place: int) -> list[int] | None:
    """The shape of what an operation gave: its autograd node, and which of its results. Without:
    ``None``."""
    known = _find(node, "_input_metadata") or ()
    return [*known[place].shape] if place < len(known) else None


#: Calls a function when the running backward is through. Without: an error.
at_end_of_backward: Callable[[Callable[[], None]], None] = _needed(
    "autograd.Variable._execution_engine.queue_callback"
)

#: Whether the running backward was asked to come by a node. Without: an error.
will_run: Callable[[Any], bool] = _needed("_C._will_engine_execute_node")

#: Whether a transform of torch.func runs. Without: an error.
transforms_are_active: Callable[[], bool] = _needed("_C._are_functorch_transforms_active")

_warns_of_vmap = _needed("_C._functorch._set_vmap_fallback_warning_enabled")


@contextmanager
def vmap_without_warnings() -> Iterator[None]:
    """``torch.func.vmap`` says nothing of operations that it takes one by one. Without: an
    error."""
    _warns_of_vmap(False)
    try:
        yield
    finally:
        _warns_of_vmap(True)


def apply_of(function: type[torch.autograd.Function]) -> Any:
    """``function.apply`` without its look at transforms, for who has looked. Without: with it."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


#: The hooks for saved tensors that are in force. Without: an error.
saved_tensors_hooks_now: Callable[[], Any] = partial(
    _needed("_C._autograd._top_saved_tensors_default_hooks"), True
)


def has_lasting_node(param: Tensor) -> bool:
    """Whether somebody holds autograd's node of a parameter, on which marks last as long as it
    does. Without: yes, which keeps steps from being captured."""
    for _ in range(2):
        node: Any = torch.autograd.graph.get_gradient_edge(param).node
        marks = getattr(node, "metadata", {has_lasting_node: True})
        if has_lasting_node in marks:
            return True
        marks[has_lasting_node] = True
        del node, marks
    return False


#: Whether autocast is on, on any device. Without: an error.
is_autocasting: Callable[[], bool] = _needed("_C._is_any_autocast_enabled")


def checkpoints_replaced(by: Any) -> AbstractContextManager[None]:
    """Another function in the place of re-entrant checkpoints. Without: an error."""
    return _replaced(checkpoint, "CheckpointFunction", by)


def parametrizations_cached_anew() -> AbstractContextManager[None]:
    """An own cache of ``torch.nn.utils.parametrize.cached()``. Without: an error."""
    return _replaced(parametrize, "_cache", {})


# -- torch.compile: what it traces, and what it has made -------------------------------------------


def as_if_compiling() -> AbstractContextManager[None]:
    """Let ``torch.compiler.is_compiling`` say yes: a model that asks for it then takes the way that
    it takes when it is compiled. Without: an error."""
    return _replaced(torch.compiler, "_is_compiling_flag", True)


@cache  # entered again and again: PyTorch would keep a variable of every patch that was entered
def backward_runs_again() -> AbstractContextManager[Any]:
    """Compiled inside, a backward keeps what it reads, and runs again. Without: PyTorch's error."""
    patch = _find(_load("torch._functorch.config"), "patch")
    return nullcontext() if patch is None else patch(donated_buffer=False)


def is_traced_once() -> bool:
    """Whether what Dynamo traces now will run as often as it is traced: not in the body of an
    operator that may run it several times, or not. Without: no."""
    tracer_now = _find(_load("torch._dynamo.symbolic_convert"), "InstructionTranslator.current_tx")
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


#: Keeps the compiler out of a function, without importing it. Without: an error on import.
never_compiled: Callable[[Callable[..., Any]], Any] = _needed("_compile._disable_dynamo")

#: The compiler's trace that runs now, or ``None``. Without: an error.
tracing_context: Callable[[], Any] = _needed("_guards.TracingContext.try_get")


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


def compiled_module(module: Any) -> Any:
    """The module that ``torch.compile`` was given, or ``module`` itself."""
    return module._orig_mod if is_compiled(module) else module


def call_of(module: Any) -> Any:
    """A module's call with its hooks, past what was compiled. Without: ``None``."""
    return module._orig_mod.__call__ if is_compiled(module) else getattr(module, "_call_impl", None)


# -- modules: their hooks, and what layers keep to themselves --------------------------------------

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

#: A module's hooks, kind by kind. Without: an error on import.
hooks_of_module: Callable[[nn.Module], Sequence[Any]] = _getter(nn.Module(), *_HOOKS)

#: The hooks of all modules alike, kind by kind. Without: likewise.
global_hooks: Callable[[], Sequence[Any]] = partial(
    _getter(nn.modules.module, *[f"_global{name}" for name in _HOOKS]), nn.modules.module
)

#: A parameter's hooks, or ``None``. Without: likewise.
hooks_of_parameter: Callable[[Tensor], Any] = _getter(Tensor, "_backward_hooks")

#: All kinds of batch normalization. Without: an error on import.
BATCH_NORMS: tuple[type[nn.Module], ...] = (
    _attribute(nn.modules.batchnorm, "_BatchNorm"),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)

#: What ``nn.utils.parametrizations.spectral_norm`` puts before a weight. Without: it is refused, as
#: other modules that change buffers.
SPECTRAL_NORM: type[nn.Module] | None = _find(nn.utils.parametrizations, "_SpectralNorm")


def function_of(node: Any) -> type | None:
    """The ``torch.autograd.Function`` that a node of a graph is of; ``None`` of PyTorch's own, and
    where PyTorch does not say it."""
    return getattr(type(node), "_forward_cls", None)


def padding_of(layer: Any) -> list[int]:
    """A convolution's padding as ``F.pad`` takes it. Without: an error."""
    return list(_attribute(layer, "_reversed_padding_repeated_twice"))


def lacks_batch_axis(layer: Any, x: Tensor) -> bool:
    """Whether an instance normalization was given one sample without its axis. Without: an error.

    Raises:
        ValueError: or what has neither as many axes as a sample nor as a batch.
    """
    _attribute(layer, "_check_input_dim")(x)
    return bool(x.dim() == _attribute(layer, "_get_no_batch_dim")())


#: The format in which operations leave what they make of a tensor. Without: an error.
memory_format_of: Callable[..., Any] = _needed("_prims_common.suggest_memory_format")


#: Output and reciprocal root mean square of RMSNorm. Without: an error.
rms_norm: Callable[..., tuple[Tensor, Tensor]] = _needed("ops.aten._fused_rms_norm.default")


_bags_backward: Callable[..., Tensor] = _needed("ops.aten._embedding_bag_dense_backward.default")


def sums_of_bags(
    ids_N: Tensor, bags_N: Tensor, weights_N: Tensor, G_Bd: Tensor, table: int
) -> Tensor:
    """``[table, d]``: ``Σ weights_n G_bag(n)`` over the n of each id, in a fixed order, without
    forming ``N`` rows. Weights and rows are of one dtype, fp32 or float64. Without: an error."""
    ids_N, bags_N = ids_N.long().contiguous(), bags_N.long().contiguous()
    unused = ids_N.new_empty(0)  # sizes and maxima of bags, which are for other modes
    return _bags_backward(
        G_Bd.contiguous(), ids_N, bags_N, unused, unused,
        table, False, 0, weights_N.contiguous(), -1,
    )  # fmt: skip


def gate_of_experts(layer: Any) -> Any:
    """What ``transformers``' experts compute between gate and up projections and the down
    projection, or ``None``. Without: such layers have no rule, and are refused or done by
    their functions."""
    return getattr(layer, "_apply_gate", None)


# -- data parallelism of PyTorch's own -------------------------------------------------------------


_DDP = nn.parallel.DistributedDataParallel

#: The ``DistributedDataParallel`` whose forward runs, or ``None``. Without: an error on import.
running_ddp: Callable[[], Any] = partial(_getter(_DDP, "_active_ddp_module"), _DDP)


def is_replica(module: nn.Module) -> Any:
    """Whether DataParallel made this module. Without: its parameters are no leaves, and refused."""
    return getattr(module, "_is_replica", None)


def is_flattened(x: Tensor) -> bool:
    """Whether FSDP has made it a part of a flat parameter, or a view of one in a parameter's place.
    Without: what is in its place is refused as no ``nn.Parameter``."""
    return any(getattr(tensor, "_fsdp_flattened", False) for tensor in (x, x._base))


#: Hooks that wait until autograd has accumulated a gradient, which never happens here. Without: an
#: error on import.
awaits_gradient: Callable[[Tensor], Any] = _getter(Tensor, "_post_accumulate_grad_hooks")


def is_awaited(x: Any) -> bool:
    """Whether a collective may still be writing this tensor; its ``wait()`` gives a plain one.
    Without: no; operators wait alone."""
    # Nobody has such a tensor before the module is there.
    functions = sys.modules.get("torch.distributed._functional_collectives")
    kind = _find(functions, "AsyncCollectiveTensor")
    return kind is not None and isinstance(x, kind)


def applied_to(module: object) -> Sequence[str]:
    """Composable functions of torch.distributed that were applied. Without: not noticed before the
    module's class is changed."""
    registry = _find(_load("torch.distributed._composable"), "_get_registry")
    return () if registry is None else tuple(registry(module) or ())


def parts_of_schedule(schedule: object) -> tuple[Any, Any, int]:
    """The one stage of a schedule of torch.distributed.pipelining, its loss function, and how many
    micro-batches it has. Without: an error where a schedule is made private."""
    stage, loss_fn = _attribute(schedule, "_stage"), _attribute(schedule, "_loss_fn")
    return stage, loss_fn, _attribute(schedule, "_n_microbatches")


def reduce_scatter_many(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any) -> Any:
    """Begin to add these tensors up over the processes of a group, each of which gets its part of
    every sum in its output, in one operation; what is returned is to be waited for. Without: an
    error where the first sums are reduced."""
    options = torch.distributed.ReduceScatterOptions()
    options.asyncOp = True
    name = "reduce_scatter_single_coalesced"
    if not hasattr(group, name):
        name = "reduce_scatter_tensor_coalesced"  # older, and deprecated
    return _attribute(group, name)([*outputs], [*inputs], options)


def local_tensor(tensor: Any) -> Tensor:
    """This process's part of a ``DTensor``, outside of autograd: what ``to_local`` gives there, in
    a hundredth of the time. Without: an error where a model with shards is wrapped."""
    found: Tensor = _attribute(tensor, "_local_tensor")
    return found


def layout_of_dtensor(tensor: Any) -> Any:
    """What :func:`dtensor_of` needs of a ``DTensor``, and can be kept. Without: an error where the
    first sums are left in ``p.grad``."""
    return _attribute(tensor, "_spec")


def dtensor_of(shard: Tensor, layout: Any) -> Tensor:
    """A ``DTensor`` of this process's shard that is laid out as another one of its dtype: what
    ``DTensor.from_local`` makes, in a tenth of the time. Without: likewise."""
    from torch.distributed.tensor import DTensor

    return DTensor(shard, layout, requires_grad=False)


# -- Opacus, which is imported by those who ask ----------------------------------------------------


def check_optimizer(optimizer: Any) -> None:
    """Attributes of Opacus' optimizer, by which skipped steps are known. Without: an error."""
    for name in ("_step_skip_queue", "_is_last_step_skipped"):
        _attribute(optimizer, name, "Opacus")


def compute_once(rdp: Any) -> None:
    """Let Opacus' Rényi DP of a step at an order, most of the cost of an ε, be computed once for a
    noise and a rate. Without: for each ε."""
    if (function := getattr(rdp, "_compute_rdp", None)) is not None:
        rdp._compute_rdp = lru_cache(maxsize=1 << 18)(function)


# -- Triton, which is imported by those who ask ----------------------------------------------------


def compiled_kernel() -> Any:
    """Type of a compiled kernel, which is started by ``kernel[grid](*addresses)``. Without:
    ``None``, and Triton looks for the kernel at every launch."""
    found = _find(_load("triton.compiler"), "CompiledKernel")
    return found if hasattr(found, "__getitem__") else None


@cache
def compilation_by_executor() -> tuple[Any, Any] | None:
    """Mode in which Triton hands kernels to an executor to compile, and the variable that says
    which mode is on. Without: ``None``, and kernels are compiled one after the other."""
    module = _load("triton.runtime._async_compile")
    mode, active = _find(module, "AsyncCompileMode"), _find(module, "active_mode")
    return None if mode is None or active is None else (mode, active)


def early_start() -> tuple[Any, Any]:
    """Functions that let the next kernel begin, and wait for the one before. Without: ``None``, and
    kernels begin one after the other."""
    cuda = _find(_load("triton.language"), "extra.cuda")
    names = ("gdc_launch_dependents", "gdc_wait")
    launch, wait = (getattr(cuda, name, None) for name in names)
    return (launch, wait) if launch is not None and wait is not None else (None, None)


@cache
def has_gluon_modules() -> bool:
    """Whether the modules are there that kernels in Gluon, Triton's lower language, are written
    with. Without: kernels in Triton run in their place."""
    try:
        importlib.import_module("triton.experimental.gluon.language")
        hopper = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
    except ImportError:
        return False
    names = ("fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait")
    return all(hasattr(hopper, name) for name in names)
