"""Private interfaces of PyTorch, Triton and Opacus: all of them that are used here.

Other versions may lack any of these. Each has a line that says what it is for, and what happens
without it. Either the rest works as before, or more slowly; or the first use raises
:class:`MissingInterface`. No norm is ever wrong for it, and ``import flash_clipping`` works.

Names are bound once, on import, so that a layer pays for none of this. They stand in files by whose
interface it is, and are imported from here. ``docs/versions.md`` has the versions that tests ran
with.
"""

from flash_clipping._compat.autograd import (
    apply_of,
    at_end_of_backward,
    checkpoints_replaced,
    graph_task,
    has_lasting_node,
    is_autocasting,
    saved_tensors_hooks_now,
    transforms_are_active,
    will_run,
)
from flash_clipping._compat.compiler import (
    as_if_compiling,
    backward_runs_again,
    call_of,
    compiles,
    constant_in_traces,
    is_autograd_compiled,
    is_compiled,
    is_compilers_error,
    is_fake,
    is_traced_once,
    never_compiled,
    tracing_context,
)
from flash_clipping._compat.lookup import (
    KNOWN,
    MissingInterface,
)
from flash_clipping._compat.modules import (
    BATCH_NORMS,
    DROPOUTS,
    SPECTRAL_NORM,
    around_modules,
    gate_of_experts,
    hooks_of_module,
    hooks_of_parameter,
    lacks_batch_axis,
    padding_of,
    rms_norm,
)
from flash_clipping._compat.opacus import (
    check_engine,
    check_optimizer,
    explain_flash_mode,
    functions_of_optimizer,
    without_validator,
)
from flash_clipping._compat.parallel import (
    applied_to,
    awaits_gradient,
    is_awaited,
    is_flattened,
    is_replica,
    parts_of_schedule,
    runs_in_ddp,
)
from flash_clipping._compat.tensors import (
    DispatchMode,
    arguments_of,
    assert_async,
    grouped_mm,
    is_alias_of,
    make_subclass,
    memory_id,
    pin_memory,
    plain_functions,
    pytree,
    references_to,
    weak_storage,
)
from flash_clipping._compat.triton import (
    compiled_kernel,
    early_start,
    gluon,
)

__all__ = [
    "BATCH_NORMS",
    "DROPOUTS",
    "SPECTRAL_NORM",
    "DispatchMode",
    "KNOWN",
    "MissingInterface",
    "applied_to",
    "apply_of",
    "arguments_of",
    "around_modules",
    "as_if_compiling",
    "backward_runs_again",
    "assert_async",
    "at_end_of_backward",
    "awaits_gradient",
    "call_of",
    "check_engine",
    "check_optimizer",
    "checkpoints_replaced",
    "compiled_kernel",
    "compiles",
    "constant_in_traces",
    "early_start",
    "explain_flash_mode",
    "functions_of_optimizer",
    "gate_of_experts",
    "gluon",
    "graph_task",
    "grouped_mm",
    "has_lasting_node",
    "hooks_of_module",
    "hooks_of_parameter",
    "is_alias_of",
    "is_autocasting",
    "is_awaited",
    "is_autograd_compiled",
    "is_compiled",
    "is_compilers_error",
    "is_fake",
    "is_flattened",
    "is_replica",
    "is_traced_once",
    "lacks_batch_axis",
    "make_subclass",
    "memory_id",
    "never_compiled",
    "padding_of",
    "parts_of_schedule",
    "pin_memory",
    "plain_functions",
    "pytree",
    "references_to",
    "rms_norm",
    "runs_in_ddp",
    "saved_tensors_hooks_now",
    "tracing_context",
    "transforms_are_active",
    "weak_storage",
    "will_run",
    "without_validator",
]
