"""Without any one of the private interfaces in ``_compat.py``: training as before, or an error."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest
import torch
from torch import nn

import flash_clipping
from flash_clipping import _compat

PACKAGE = Path(flash_clipping.__file__).parent
COMPAT = PACKAGE / "_compat.py"

#: Every name of ``_compat.py``, the private names or modules behind it, and what a training step
#: does without these: "same", or the error that it raises.
INTERFACES: dict[str, tuple[list[str], str]] = {
    "graph_task": (["_current_graph_task_id"], r"torch\._C\._current_graph_task_id"),
    "at_end_of_backward": (["_execution_engine"], r"_execution_engine\.queue_callback"),
    "will_run": (["_will_engine_execute_node"], r"torch\._C\._will_engine_execute_node"),
    "transforms_are_active": (
        ["_are_functorch_transforms_active"],
        r"_are_functorch_transforms_active",
    ),
    "vmap_without_warnings": (["_set_vmap_fallback_warning_enabled"], "same"),
    "apply_of": (["apply"], "same"),
    "saved_tensors_hooks_now": (
        ["_top_saved_tensors_default_hooks"],
        r"_saved_tensors_default_hooks",
    ),
    "has_lasting_node": (["metadata"], "same"),
    "memory_id": (["_cdata"], r"UntypedStorage\._cdata"),
    "references_to": (["_storage_Use_Count"], "same"),
    "borrowed": (["_construct_storage_from_data_pointer"], "same"),
    "end_failed_capture": (["_cuda_endAllocateToPool", "_cuda_releasePool"], "same"),
    "let_memory_grow": (["_set_allocator_settings"], "same"),
    "add_all": (["_foreach_add_"], "same"),
    "copy_all": (["_foreach_copy_"], "same"),
    "is_alias_of": (["_is_alias_of"], r"torch\._C\._is_alias_of"),
    "laid_out_like": (["TensorGuards"], r"TensorGuards"),
    "plain_functions": (["DisableTorchFunctionSubclass"], "DisableTorchFunctionSubclass"),
    "make_subclass": (["_make_subclass"], r"torch\.Tensor\._make_subclass"),
    "pytree": (["_pytree"], r"torch\.utils\._pytree"),
    "grouped_mm": (["nn.functional.grouped_mm", "_grouped_mm"], "same"),
    "DispatchMode": (["TorchDispatchMode"], "TorchDispatchMode"),
    "arguments_of": (["_schema"], "same"),
    "is_autocasting": (["_is_any_autocast_enabled"], r"torch\._C\._is_any_autocast_enabled"),
    "parametrizations_cached_anew": (["_cache"], "same"),
    "checkpoints_replaced": (["CheckpointFunction"], r"CheckpointFunction"),
    "as_if_compiling": (["_is_compiling_flag"], "same"),
    "backward_runs_again": (["torch._functorch.config"], "same"),
    "is_traced_once": (["torch._dynamo.symbolic_convert"], "same"),
    "constant_in_traces": (["_dynamo_marked_constant"], "same"),
    "never_compiled": (["_disable_dynamo"], r"_compile\._disable_dynamo"),
    "tracing_context": (["TracingContext"], "same"),
    "is_fake": (["FakeTensor"], "same"),
    "is_compilers_error": (["torch._dynamo.exc"], "same"),
    "is_autograd_compiled": (["torch._dynamo.compiled_autograd"], "same"),
    "is_compiled": (["OptimizedModule"], "same"),
    "compiled_module": (["OptimizedModule"], "same"),
    "compiles": (["OptimizeContext"], "same"),
    "call_of": (["_call_impl"], "same"),
    "hooks_of_module": (["_forward_hooks"], r"Module\._forward_hooks"),
    "unseen_functions": (["DisableTorchFunction"], r"torch\._C\.DisableTorchFunction"),
    "unseen_operators": (["_DisableTorchDispatch"], r"torch\._C\._DisableTorchDispatch"),
    "global_hooks": (["_global_forward_hooks"], r"_global_forward_hooks"),
    "roots_of_backward": (["_engine_run_backward"], "same"),
    "shape_of_result": (["_input_metadata"], "same"),
    "hooks_of_parameter": (["_backward_hooks"], r"\._backward_hooks"),
    "BATCH_NORMS": (["_BatchNorm"], r"_BatchNorm"),
    "function_of": (["_forward_cls"], "same"),
    "SPECTRAL_NORM": (["_SpectralNorm"], "same"),
    "padding_of": (
        ["_reversed_padding_repeated_twice"],
        r"Conv1d\._reversed_padding",
    ),
    "lacks_batch_axis": (
        ["_check_input_dim", "_get_no_batch_dim"],
        r"InstanceNorm1d\._check_input_dim",
    ),
    "sums_of_bags": (["_embedding_bag_dense_backward"], "same"),
    "gate_of_experts": (["_apply_gate"], "same"),
    "memory_format_of": (["suggest_memory_format"], r"suggest_memory_format"),
    "rms_norm": (["_fused_rms_norm"], r"_fused_rms_norm"),
    "running_ddp": (["_active_ddp_module"], r"DistributedDataParallel\._active_ddp_module"),
    "is_replica": (["_is_replica"], "same"),
    "is_flattened": (["_fsdp_flattened"], "same"),
    "awaits_gradient": (["_post_accumulate_grad_hooks"], r"_post_accumulate_grad_hooks"),
    "is_awaited": (["AsyncCollectiveTensor"], "same"),
    "applied_to": (["torch.distributed._composable"], "same"),
    "parts_of_schedule": (["_loss_fn"], "same"),
    "reduce_scatter_many": (["reduce_scatter_tensor_coalesced"], "same"),
    "local_tensor": (["_local_tensor"], "same"),
    "layout_of_dtensor": (["_spec"], "same"),
    "dtensor_of": (["_spec"], "same"),
    "check_optimizer": (["_step_skip_queue"], r"DPOptimizer\._step_skip_queue"),
    "compute_once": (["_compute_rdp"], "same"),
    "compiled_kernel": (["triton.compiler"], "same"),
    "compilation_by_executor": (["AsyncCompileMode"], "same"),
    "early_start": (["gdc_wait"], "same"),
    "has_gluon_modules": (["triton.experimental.gluon.language"], "same"),
}

#: How a step is refused.
NO_INTERFACE = r"(?s)MissingInterface: .*Known to work: \w+ \d"

#: Runs a step once for every set of hidden names, each in a process of its own that has imported
#: PyTorch and Opacus already; prints what came of it, a line each.
PROGRAM = '''
import gc, importlib, json, os, sys, warnings
from importlib.machinery import PathFinder
from types import SimpleNamespace
import torch, opacus, torch._dynamo, triton
from torch import nn

# What every one of the processes would import else; it takes most of their time.
for name in (
    "transformers.pytorch_utils", "triton.experimental.gluon", "torch.nn.utils.prune",
    "cryptography.hazmat.primitives.ciphers", "opacus.utils.batch_memory_manager",
):
    try:
        importlib.import_module(name)
    except ImportError:
        pass

gc.collect()
gc.freeze()  # or the processes would copy all that was imported
warnings.simplefilter("ignore")
torch.set_num_threads(1)

def hide(names):
    """Let _compat.py find none of these, once it is imported."""
    has, get, load = hasattr, getattr, importlib.import_module
    def hidden_get(thing, name, *default):
        if name not in names:
            return get(thing, name, *default)
        if default:
            return default[0]
        raise AttributeError(name)
    def hidden_load(name, package=None):
        if name in names:
            raise ImportError(name)
        return load(name, package)
    def run(module, run_file):
        module.getattr = hidden_get
        module.hasattr = lambda thing, name: name not in names and has(thing, name)
        before, importlib.import_module = importlib.import_module, hidden_load
        try:
            run_file(module)
        finally:
            importlib.import_module = before
        if has(module, "importlib"):
            module.importlib = SimpleNamespace(import_module=hidden_load)
    class Finder:
        """Finds what PathFinder finds, and runs it in its own way."""
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name != "flash_clipping._compat":
                return None
            spec = PathFinder.find_spec(name, path, target)
            run_file = spec.loader.exec_module
            spec.loader.exec_module = lambda module: run(module, run_file)
            return spec
    sys.meta_path.insert(0, Finder)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 4, padding="same", padding_mode="circular")
        self.instance = nn.InstanceNorm1d(4, affine=True)
        self.group = nn.GroupNorm(2, 4)
        self.norm = nn.RMSNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
        self.scale = nn.Parameter(torch.ones(5, 4))
        self.dropout = nn.Dropout(0.0)
        self.last = nn.Linear(4, 2)
    def forward(self, x):
        x = self.norm(self.group(self.instance(self.conv(x))).mT)
        x = x + self.attention(x, x, x, need_weights=False)[0] * self.scale
        return self.last(self.dropout(x)).mean(1)

def step():
    import flash_clipping
    from flash_clipping.ops.embedding import embedding_sqnorms
    found = []
    generator = torch.Generator().manual_seed(2)
    data = torch.utils.data.TensorDataset(torch.randn(4, 3, 5, generator=generator))
    for mode in ("one_pass", "two_pass"):
        torch.manual_seed(1)
        model = Model()
        model.attention.dropout = 0.0
        model, optimizer, _, loader = flash_clipping.FlashPrivacyEngine(seed=3).make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.MSELoss(),
            data_loader=torch.utils.data.DataLoader(data, batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=0.1,
            poisson_sampling=False,
            mode=mode,
        )
        run = flash_clipping.GraphedStep(lambda x: model(x).square().mean().backward(), model)
        for _ in range(2):
            for x, in loader:
                run(x)
                found += model.get_norm_sample().tolist()
                optimizer.step()
                optimizer.zero_grad()
        found += torch.cat([p.flatten() for p in model.parameters()]).tolist()
    ids, G = torch.tensor([[0, 1, 1]]), torch.arange(6.0).view(1, 3, 2)
    return found + embedding_sqnorms(ids, G, backend="triton").tolist()

for names in json.loads(sys.argv[1]):
    reader, writer = os.pipe()
    if not os.fork():
        try:
            hide(names)
            answer = step()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        print(pipe.read(), flush=True)
    os.wait()
'''


def answers(groups: list[list[str]]) -> list[list[float] | str]:
    """What a step gives with all interfaces, and then without those of each group."""
    hidden = [[], *([name for key in group for name in INTERFACES[key][0]] for group in groups)]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(hidden)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(PACKAGE.parent)},
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def verdict(name: str, whole: list[float], found: list[float] | str) -> str:
    """What is wrong without it; nothing where a step is the same, or refused as it should be."""
    _, expected = INTERFACES[name]
    if expected != "same":
        if not isinstance(found, str):
            return "a step ran"
        if not re.search(expected, found):
            return found
        return "" if re.match(NO_INTERFACE, found) else found
    if isinstance(found, str):
        return found
    try:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(whole))
    except AssertionError as error:
        return str(error)
    return ""


def check_steps(groups: list[list[str]]) -> None:
    """All in one test: workers that share tests would start the processes once each."""
    whole, *found = answers(groups)
    assert not isinstance(whole, str), whole
    verdicts = {
        ", ".join(group): verdict(group[0], whole, answer)
        for group, answer in zip(groups, found, strict=True)
    }
    assert not any(verdicts.values()), {names: what for names, what in verdicts.items() if what}


SAME = [name for name, (_, expected) in INTERFACES.items() if expected == "same"]
REFUSED = [name for name in INTERFACES if name not in SAME]

#: What a step does not need is hidden together, in groups of what lies apart in the table: it is
#: seldom that the fallback of one of them leaves nothing to do for that of another.
TOGETHER = [SAME[first::4] for first in range(4)]

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


@needs_fork
def test_without_any_of_them_steps_are_the_same_or_refused() -> None:
    check_steps([*([name] for name in REFUSED), *TOGETHER])


@needs_fork
@pytest.mark.slow
def test_without_each_of_them_alone() -> None:
    check_steps([[name] for name in INTERFACES])


def test_the_table_is_complete() -> None:
    names = set()
    for node in ast.parse(COMPAT.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
    assert {name for name in names if not name.startswith("_")} == {*INTERFACES}


# -- what a step on a CPU does not show -----------------------------------------------------------


def test_sums_of_bags_are_the_same_with_rows_that_are_formed() -> None:
    torch.manual_seed(0)
    ids_N, bags_N = torch.randint(5, (40,)), torch.randint(3, (40,))
    operands = ids_N, bags_N, torch.randn(40).double(), torch.randn(3, 4).double(), 6
    ids_N, bags_N, weights_N, G_Bd, table = operands
    found = _compat.sums_of_bags(*operands)
    rows_Nd = G_Bd[bags_N] * weights_N[:, None]
    expected = torch.zeros(table, 4).double().index_add_(0, ids_N, rows_Nd)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found[:5].any(1).all() and not found[5].any()


def test_hooks_are_all_of_a_modules_and_parameters() -> None:
    layer = nn.Linear(1, 1)
    layer.register_forward_pre_hook(lambda *_: None)
    layer.register_forward_hook(lambda *_: None)
    layer.register_full_backward_pre_hook(lambda *_: None)
    layer.register_full_backward_hook(lambda *_: None)
    layer.weight.register_hook(lambda _: None)
    assert [len(hooks) for hooks in _compat.hooks_of_module(layer)] == [1, 1, 1, 1]
    assert len(_compat.hooks_of_parameter(layer.weight)) == 1


def test_a_node_lasts_as_long_as_a_graph() -> None:
    param = nn.Parameter(torch.ones(1))
    assert not _compat.has_lasting_node(param)
    graph = param * 2
    assert _compat.has_lasting_node(param)
    del graph
    assert not _compat.has_lasting_node(param)


def test_references_are_counted() -> None:
    x = torch.ones(3)
    storage = x.untyped_storage()
    before = _compat.references_to(_compat.memory_id(storage))
    y = x[1:]
    assert _compat.references_to(_compat.memory_id(storage)) == before + 1
    assert _compat.is_alias_of(x, y) and not _compat.is_alias_of(x, x.clone())


# -- and nowhere else -----------------------------------------------------------------------------

#: What modules and tensors have always had, without a public name, and layers read in every step.
ALLOWED = {
    "_parameters": "a module's own parameters, which stand-ins replace",
    "_buffers": "a module's own buffers, which rehearsals replace",
    "_modules": "a module's children, compared by identity in every step",
    "_version": "how often a tensor was written to",
    "_is_view": "whether autograd takes a tensor for a view",
    "_step_skip_queue": "of Opacus' optimizer; _compat.check_optimizer looks for it",
    "_adjusted_noise_multiplier": "left by Opacus' adaptive criterion; absent means none",
    "_data_source": "of Lightning's fit loop; absent is an error before the first step",
    "_accelerator_connector": "of Lightning's trainer; absent is an error before the first step",
    "_prepare_inputs": "of transformers' Trainer, which subclasses override",
    "_get_feat_extract_output_lengths": "of speech models of transformers; losses are compared",
    "_replace": "of named tuples",
    "_indices": "of Hugging Face's datasets: what was selected; absent means all rows",
    "_data": "of the same: the table that was selected from",
    "_fields": "of named tuples",
    "_hf_hook": "of Accelerate, on modules that device_map spreads; absent means none",
    "_reinterpret": "of Gluon's buffers; the versions that are used are known",
    "_getframe": "of sys",
}
LIBRARIES = ("torch", "opacus", "triton")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _calls(node: ast.AST, *names: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines with a private name that something else may own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield node.lineno, node.attr
        elif _calls(node, "getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(str(name.value)):
                yield node.lineno, str(name.value)


def _private_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        paths: list[str] = []
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        for path in paths:
            first, *rest = path.split(".")
            if first in LIBRARIES and any(map(_is_private, rest)):
                yield node.lineno, path  # type: ignore[attr-defined]


def _own_names(tree: ast.Module) -> Iterator[str]:
    """Names that this file defines: functions, classes, variables, attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif _calls(node, "setattr"):
            yield ast.literal_eval(node.args[1]) if isinstance(node.args[1], ast.Constant) else ""


def test_no_other_file_uses_a_private_interface() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path != COMPAT]
    trees = {path: ast.parse(path.read_text()) for path in files}
    own = {name for tree in trees.values() for name in _own_names(tree)}
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in (*_private_names(tree), *_private_imports(tree))
        if name not in own and name not in ALLOWED
    ]
    assert not found, "\n".join(found)


def test_what_is_allowed_is_in_use() -> None:
    text = "\n".join(p.read_text() for p in PACKAGE.rglob("*.py") if p != COMPAT)
    assert not [name for name in ALLOWED if name not in text]
