"""Private interfaces of PyTorch, Triton and Opacus: all of them that are used here.

Other versions may lack any of these. Each has a line that says what it is for, and what happens
without it. Either the rest works as before, or more slowly; or the first use raises
:class:`MissingInterface`. No norm is ever wrong for it, and ``import flash_clipping`` works.

Names are bound once, on import, so that a layer pays for none of this. They stand in files by whose
interface it is, and are imported from here. ``docs/versions.md`` has the versions that tests ran
with.
"""

from flash_clipping._compat.autograd import (
    apply_of as apply_of,
    at_end_of_backward as at_end_of_backward,
    checkpoints_replaced as checkpoints_replaced,
    graph_task as graph_task,
    has_lasting_node as has_lasting_node,
    is_autocasting as is_autocasting,
    saved_tensors_hooks_now as saved_tensors_hooks_now,
    transforms_are_active as transforms_are_active,
    will_run as will_run,
)
from flash_clipping._compat.compiler import (
    as_if_compiling as as_if_compiling,
    backward_runs_again as backward_runs_again,
    call_of as call_of,
    compiles as compiles,
    constant_in_traces as constant_in_traces,
    is_autograd_compiled as is_autograd_compiled,
    is_compiled as is_compiled,
    is_compilers_error as is_compilers_error,
    is_fake as is_fake,
    is_traced_once as is_traced_once,
    never_compiled as never_compiled,
    tracing_context as tracing_context,
)
from flash_clipping._compat.lookup import KNOWN as KNOWN, MissingInterface as MissingInterface
from flash_clipping._compat.modules import (
    BATCH_NORMS as BATCH_NORMS,
    DROPOUTS as DROPOUTS,
    SPECTRAL_NORM as SPECTRAL_NORM,
    around_modules as around_modules,
    gate_of_experts as gate_of_experts,
    hooks_of_module as hooks_of_module,
    hooks_of_parameter as hooks_of_parameter,
    lacks_batch_axis as lacks_batch_axis,
    padding_of as padding_of,
    rms_norm as rms_norm,
)
from flash_clipping._compat.opacus import (
    check_engine as check_engine,
    check_optimizer as check_optimizer,
    explain_flash_mode as explain_flash_mode,
    functions_of_optimizer as functions_of_optimizer,
    without_validator as without_validator,
)
from flash_clipping._compat.parallel import (
    applied_to as applied_to,
    awaits_gradient as awaits_gradient,
    dtensor_of as dtensor_of,
    is_awaited as is_awaited,
    is_flattened as is_flattened,
    is_replica as is_replica,
    layout_of_dtensor as layout_of_dtensor,
    local_tensor as local_tensor,
    parts_of_schedule as parts_of_schedule,
    reduce_scatter_many as reduce_scatter_many,
    runs_in_ddp as runs_in_ddp,
)
from flash_clipping._compat.tensors import (
    DispatchMode as DispatchMode,
    arguments_of as arguments_of,
    assert_async as assert_async,
    grouped_mm as grouped_mm,
    is_alias_of as is_alias_of,
    make_subclass as make_subclass,
    memory_id as memory_id,
    pin_memory as pin_memory,
    plain_functions as plain_functions,
    pytree as pytree,
    references_to as references_to,
)
from flash_clipping._compat.triton import (
    compiled_kernel as compiled_kernel,
    early_start as early_start,
    gluon as gluon,
)
