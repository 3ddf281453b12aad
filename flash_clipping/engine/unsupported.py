"""Models that are refused: layers and parameters that no clipping can bound, or that no tap can
serve, and PyTorch's own data parallelism, in all its forms.

That reduces gradients as autograd accumulates them. Those of a private model are clipped sums,
which autograd never sees: what comes out is exactly 0, or one process's own.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from opacus.validators import ModuleValidator
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, distributed as dist, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from flash_clipping._compat import (
    BATCH_NORMS,
    applied_to,
    awaits_gradient,
    hooks_of_parameter,
    is_flattened,
    is_replica,
    running_ddp,
)
from flash_clipping.capture.factor_source import Guard
from flash_clipping.capture.refused_forwards import embeddings_of, refuse_max_norm
from flash_clipping.distributed import has_shards, is_sharded, processes_of, refuse_sharding
from flash_clipping.engine import wings
from flash_clipping.errors import (
    ONE_BY_ONE,
    TO_EXPORT,
    FlashClippingError,
    InvalidValue,
    NotServed,
    module_at,
)

# -- data parallelism ------------------------------------------------------------------------------

#: Where context_parallel stands, in PyTorch.
_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental"

#: Where stages of pipelines run models. Nobody has such a stage before it is imported.
PIPELINES = "torch.distributed.pipelining.stage"

_INSTEAD = (
    "Wrap the model in opacus.distributed.DifferentiallyPrivateDistributedDataParallel, or call "
    "fully_shard on its blocks and on it; give that to make_private(module=...), and leave it to "
    "nobody else (with Accelerate: do not pass model or optimizer to prepare())."
)


def _form_of(module: nn.Module) -> str | None:
    """The form of PyTorch's data parallelism that this module is, or is managed by."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return f"torch.nn.parallel.{type(module).__name__}"
    if not dist.is_available():
        return None
    # Imported when first needed: they load half of torch.distributed.
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if isinstance(module, FullyShardedDataParallel):
        return "torch.distributed.fsdp.FullyShardedDataParallel"
    if isinstance(module, FSDPModule):
        return "torch.distributed.fsdp.fully_shard"
    if "replicate" in applied_to(module):
        return "torch.distributed's replicate"
    return None


def _refuse_form(where: str, form: str, kind: type[Exception] = FlashClippingError) -> NoReturn:
    raise kind(
        f"FC601 {where}: found {form}, which reduces gradients as autograd has them. Those of a "
        f"private model are clipped sums, which autograd does not see. {_INSTEAD}"
    )


def refuse_inside(path: str, module: nn.Module) -> None:
    """Refuse a module of a model that is about to be wrapped, if it reduces or shards gradients, or
    Python cannot follow it."""
    if isinstance(module, torch.jit.ScriptModule):
        raise NotServed(
            f"FC116 {path or 'the model'} ({module.original_name}): found a module of "
            "torch.jit.script, whose layers Python never runs. Give the plain module, and compile "
            "it:\n"
            "    model.compile()"
        )
    if (form := _form_of(module)) is not None and not is_sharded(module):
        _refuse_form(path or "the model", form, NotServed)


def refuse_around(module: nn.Module, may_be_replica: bool = True) -> None:
    """Refuse a forward of a private model that is a replica, runs inside DistributedDataParallel,
    or with the positions of a sample in several processes."""
    if torch.is_grad_enabled() and (torch.jit.is_tracing() or torch.compiler.is_exporting()):
        refuse_export(module)
    # All forms of context_parallel put a function of theirs in the place of this builtin.
    if _CONTEXT_PARALLEL in (getattr(F.scaled_dot_product_attention, "__module__", None) or ""):
        raise FlashClippingError(
            f"FC651 the model ({type(module).__name__}): found torch.distributed's "
            "context_parallel around a private model: each process would clip its own part of a "
            "sample's gradient. Give every sample to one process: fully_shard, with activation "
            "checkpointing or mode='two_pass' for long sequences."
        )
    in_ddp = running_ddp() is not None
    if in_ddp or (may_be_replica and is_replica(module)):
        form = "DistributedDataParallel" if in_ddp else "DataParallel"
        where = f"the model ({type(module).__name__})"
        _refuse_form(where, f"torch.nn.parallel.{form} around it")


def refuse_in_pipeline(module: nn.Module) -> None:
    """Refuse a forward of a private model that a stage of a pipeline runs alone: every stage
    would clip by its own norms."""
    if is_dynamo_compiling():
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == PIPELINES:
            raise FlashClippingError(
                f"FC640 the model ({type(module).__name__}): found a stage of "
                "torch.distributed.pipelining that runs a private model: every stage would clip by "
                "the norms of its own parameters. Run the schedule by "
                "flash_clipping.PrivateSchedule(schedule, microbatch_size=...), on all stages."
            )
        frame = frame.f_back


def refuse_since(module: nn.Module, sharded: Container[nn.Module] = ()) -> None:
    """Refuse a private model that was sharded or replicated after it was wrapped (``sharded``:
    modules that were before), or in which another tensor is where a parameter was."""
    for path, part in module.named_modules():
        form = None if part in sharded else _form_of(part)
        for name, param in part._parameters.items():
            if param is None:
                continue
            # Parts of one flat parameter take the parameters' places.
            if is_flattened(param):
                form = "torch.distributed.fsdp.FullyShardedDataParallel"
            elif not isinstance(param, nn.Parameter):
                raise FlashClippingError(
                    f"FC141 {path}.{name}: found a {type(param).__name__} in its place, as "
                    "torch.func.functional_call puts there; expected the model's own parameter. "
                    "Call the private model itself, and functional_call on the plain one:\n"
                    "    plain = model.to_standard_module()"
                )
        if form is not None:
            _refuse_form(path or "the model", form)


def refuse_export(module: nn.Module) -> NoReturn:
    """Refuse to be exported with what records gradients."""
    raise FlashClippingError(
        f"FC430 the model ({type(module).__name__}): found torch.export, torch.onnx.export, "
        f"torch.jit.trace or torch.jit.script of a private model. {TO_EXPORT}"
    )


def refuse_lacking(module: nn.Module, optimizer: Any) -> None:
    """Raise ``ValueError`` unless the optimizer has all trainable parameters of the module."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if not names:
        return
    listed = ", ".join(f'"{name}"' for name in names)
    raise InvalidValue(
        f"FC535 optimizer: found {type(optimizer).__name__} without {len(names)} of the module's "
        f"trainable parameters, {names[0]} among them; expected all of them: a second optimizer "
        "would move the rest by sums without noise. Give one optimizer a group for each part, with "
        "settings of its own:\n"
        '    optimizer.add_param_group({"params": [model.get_parameter(name) for name in '
        f"[{listed}]]}})\n"
        "Or make one of both:\n"
        "    optimizer = flash_clipping.SeveralOptimizers(optimizer, other)\n"
        "Or freeze what is not to be trained:\n"
        f"    for name in [{listed}]: model.get_parameter(name).requires_grad_(False)"
    )


def refuse_alone(module: Any, distributed: Any) -> None:
    """Raise ``ValueError`` for a model that several processes of ``torch.distributed`` would train
    apart, with nothing to reduce its gradients, unless ``distributed=False`` says so."""
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

    if isinstance(module, DifferentiallyPrivateDistributedDataParallel) or is_sharded(module):
        return
    running = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if running else 1
    processes, instead, cut = processes_of(module), _INSTEAD, ""
    if processes is not None:
        if distributed is not None or processes.mesh.size() == world:
            return
        instead = "Call fully_shard over the data dimension of the mesh as well."
        cut = f", whose layers are cut over {processes.mesh.size()} of them,"
    elif not distributed and (distributed is not None or world == 1):
        return
    for path, part in module.named_modules():
        refuse_inside(path, part)
    raise InvalidValue(
        f"FC602 module ({type(module).__name__}): found {world} processes of torch.distributed, "
        f"and nothing that would reduce the gradients of the model{cut} over them. {instead} Or "
        "pass distributed=False to make_private, if each trains a model of its own."
    )


# -- layers and parameters -------------------------------------------------------------------------

#: Layers that read their parameters past any stand-in, and what to use instead.
_REPLACED_LAYERS = {nn.LSTM: "DPLSTM", nn.GRU: "DPGRU", nn.RNN: "DPRNN"}

#: Of which Opacus' verdict is not asked: they are supported, or refused by what is written here.
_JUDGED_HERE = {nn.MultiheadAttention, *BATCH_NORMS, *_REPLACED_LAYERS}

_FIX = "\n    import opacus; model = opacus.validators.ModuleValidator.fix(model)"

#: The same for batch normalizations that it passes over: subclasses, and those that train nothing.
_GROUPS = """
    import math; from torch import nn; kind = nn.modules.batchnorm._BatchNorm
    for path, x in [(path, m) for path, m in model.named_modules() if isinstance(m, kind)]: \
model.set_submodule(path, nn.GroupNorm(math.gcd(32, x.num_features), x.num_features, \
affine=x.affine).to(next(model.parameters())))"""


class UnsupportedModel(NotServed, UnsupportedModuleError):
    """A model with a layer that cannot be trained privately as it is; also the error of Opacus."""


def refuse_complex(name: str, param: nn.Parameter) -> None:
    """Raise ``FlashClippingError`` for a trainable parameter that is complex."""
    if param.requires_grad and param.is_complex():
        raise FlashClippingError(
            f"FC115 {name}: a complex parameter ({param.dtype}), which mode='one_by_one' alone "
            "supports. Keep it as reals, nn.Parameter(torch.view_as_real(w)), and use "
            f"torch.view_as_complex(self.w) in forward, which is exact and fast.{ONE_BY_ONE}"
        )


def refuse_hooks(name: str, param: Tensor) -> None:
    """Raise ``FlashClippingError`` for a trainable parameter with a hook that is not ours."""
    if not param.requires_grad:
        return
    hooks: Any = hooks_of_parameter(param)
    own = hooks.values() if isinstance(hooks, dict) else ()
    if awaits_gradient(param) or any(type(getattr(f, "__self__", None)) is not Guard for f in own):
        raise FlashClippingError(
            f"FC506 {name}: found a hook on this parameter (register_hook, or "
            "register_post_accumulate_grad_hook). Autograd brings a private parameter no gradient. "
            "Take the hook off, by remove() of its handle, and change what noise was added to, by "
            "a mask, say:\n"
            f'    param = model.get_parameter("{name}")\n'
            "    optimizer.attach_step_hook(lambda _: param.grad.mul_(mask))"
        )


def refuse_unsupported(root: nn.Module) -> None:
    """Refuse a model in which a layer mixes samples, has parameters that are complex or without
    shape or values, reduces gradients itself, or reads its parameters past any tap."""
    refuse_sharding(root)
    refuse_batch_norms(batch_norms_of(root))
    for name, param in root.named_parameters():
        refuse_complex(name, param)
    _refuse_in_any_mode(root)
    for path, module in root.named_modules():
        wings.refuse_rounding(path, module)
        if type(module) in _REPLACED_LAYERS and _trains(module):
            _refuse_recurrent(path, module)


def refuse_one_by_one(root: nn.Module) -> None:
    """Refuse models that are spread over processes, or whose layers keep statistics of samples."""
    if has_shards(root) or processes_of(root) is not None:
        raise NotServed(
            'FC189 mode="one_by_one": found a model whose parameters are spread over processes '
            "(fully_shard, parallelize_module). Samples run through a whole model. Use another "
            "mode, or train by DifferentiallyPrivateDistributedDataParallel."
        )
    for path, module in batch_norms_of(root):
        if module.training and module.running_mean is not None:
            raise NotServed(
                f"FC104 {path or 'the model'} ({type(module).__name__}): it keeps running "
                "statistics of samples, which get no noise and are saved with the model. Replace "
                "it by nn.GroupNorm, or make it without them:\n"
                f"    norm = nn.{type(module).__name__}(features, track_running_stats=False)"
            )
    _refuse_in_any_mode(root)


def _refuse_in_any_mode(root: nn.Module) -> None:
    refuse_max_norm(embeddings_of(root))
    for name, param in root.named_parameters():
        refuse_hooks(name, param)
    refuse_unloaded(root)
    for path, module in root.named_modules():
        refuse_inside(path, module)
        for name, param in module._parameters.items():
            if param is not None and is_lazy(param):
                raise NotServed(
                    f"FC113 {path or 'the model'} ({type(module).__name__}): its parameter "
                    f"{name!r} has no shape before the first forward. Call the model once on a "
                    "batch, then make the optimizer and wrap the model.\n"
                    "    with torch.no_grad(): model(x)"
                )


def refuse_replay(mode: str, what: str) -> None:
    """Refuse to compile a model whose samples run one at a time, or to replay its steps."""
    if mode == "one_by_one":
        raise NotServed(
            f"FC188 {what}: found mode='one_by_one', in which samples run one at a time, each as "
            "it is: nothing is compiled or replayed. Leave it out."
        )


def refuse_frozen(root: nn.Module) -> None:
    """Raise ``ValueError`` for a model in which nothing would be trained."""
    if any(param.requires_grad for param in root.parameters()):
        return
    names = [name for name, _ in root.named_parameters()]
    path = "".join(names[-1:]).removeprefix("_module.").rpartition(".")[0]
    raise InvalidValue(
        f"FC305 module ({type(root).__name__}): found no trainable parameter, {len(names)} of them "
        "frozen; expected one at least. Before the optimizer is made, for the last layer:\n"
        f"    {module_at(path)}.requires_grad_(True)"
    )


def batch_norms_of(root: nn.Module) -> list[tuple[str, Any]]:
    """The batch normalizations in a model, by path."""
    return [(path, m) for path, m in root.named_modules() if isinstance(m, BATCH_NORMS)]


def refuse_batch_norms(norms: Sequence[tuple[str, Any]]) -> None:
    """Raise :class:`UnsupportedModel` for those of these batch normalizations, by path, that read
    statistics of the batch now. In eval mode, with running statistics, rows are independent."""
    for path, module in norms:
        has_statistics = module.running_mean is not None and module.running_var is not None
        if has_statistics and not module.training:
            continue
        is_fixed = all(type(m) in ModuleValidator.FIXERS and _trains(m) for _, m in norms)
        line = _FIX if path and is_fixed else _GROUPS
        if type(module).__module__.startswith("timm."):  # it holds an activation
            line = "\n    model = timm.create_model(name, norm_layer=timm.layers.GroupNormAct)"
        if has_statistics:
            line += (
                "\nWith running statistics, of public data, it may stay as it is in eval mode; "
                f"after every model.train():\n    {module_at(path)}.eval()"
            )
        raise UnsupportedModel(
            f"FC101 {path or 'the model'} ({type(module).__name__}) mixes samples: the "
            "gradient of one sample depends on the others, so no clipping can bound it. Replace it "
            "by nn.GroupNorm, before the optimizer is made:"
            f"{line if has_statistics else line + ONE_BY_ONE}"
        )


def _trains(module: nn.Module) -> bool:
    return any(param.requires_grad for param in module.parameters(recurse=False))


def _refuse_recurrent(path: str, module: Any) -> NoReturn:
    """Refuse a recurrent layer of PyTorch, with the line that puts Opacus' in its place."""
    name = _REPLACED_LAYERS[type(module)]
    given = "old.num_layers, old.bias, old.batch_first, old.dropout, old.bidirectional"
    given += ", nonlinearity=old.nonlinearity" * (name == "DPRNN")
    advice = (
        f"Replace it by opacus.layers.{name}, which takes its state dict:\n"
        f"    import opacus; old = {module_at(path)}\n"
        f"    new = opacus.layers.{name}(old.input_size, old.hidden_size, {given})\n"
        f'    new.load_state_dict(old.state_dict()); model.set_submodule("{path}", new)'
    )
    if module.proj_size:
        advice = f"No other layer has its proj_size.{ONE_BY_ONE}"
    raise UnsupportedModel(
        f"FC110 {path or 'the model'} ({type(module).__name__}) has no per-sample gradients. "
        f"{advice}"
    )


def refuse_unloaded(root: nn.Module) -> None:
    """Raise ``FlashClippingError`` for a parameter without values, unless it is frozen and a hook
    of Accelerate's, of its module or one around it, loads it for every forward (``device_map``)."""
    loaded = {inside for module in root.modules() if _loads(module) for inside in module.modules()}
    for path, module in root.named_modules():
        for name, param in module._parameters.items():
            if param is None or not param.is_meta or is_lazy(param):
                continue
            if not param.requires_grad and module in loaded:
                continue
            advice = (
                "Loading makes another parameter, which neither the optimizer nor the wrapper "
                "would know. Load the model, then make the optimizer and wrap it:\n"
                '    model.to_empty(device="cpu"); model.load_state_dict(state)'
            )
            if param.requires_grad and loaded:  # adapters of what is offloaded are made there
                advice = (
                    "Gradients of what Accelerate loads for every forward reach no parameter. "
                    "Frozen modules alone may be offloaded:\n"
                    '    model = AutoModelForCausalLM.from_pretrained(name, device_map={"": 0})'
                )
            raise FlashClippingError(
                f"FC125 {f'{path}.{name}'.lstrip('.')}: found a parameter without values, on the "
                f"meta device; expected one on the device that it is trained on. {advice}"
            )


def _loads(module: nn.Module) -> bool:
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(one, "offload", False) for one in getattr(hook, "hooks", (hook,)))


def validate(module: nn.Module, mode: str = "one_pass") -> None:
    """Raise :class:`UnsupportedModel` for evaluation mode, and for what a validator of Opacus', or
    of the user's (``register_module_validator``), refuses, by the module's name;
    ``mode="one_by_one"`` takes all."""
    if mode == "one_by_one":
        return
    if not module.training:
        raise UnsupportedModel(
            f"FC112 the model ({type(module).__name__}): found evaluation mode; expected training "
            "mode, as the model will be trained:\n"
            "    model.train()"
        )
    for path, part in module.named_modules():
        verdict = ModuleValidator.VALIDATORS.get(type(part))
        if verdict is None or type(part) in _JUDGED_HERE or not _trains(part):
            continue
        for error in verdict(part):
            raise UnsupportedModel(
                f"FC111 {path.removeprefix('_module.') or 'the model'} ({type(part).__name__}): "
                "found what its validator of Opacus refuses. "
                f"{error}{_FIX if type(part) in ModuleValidator.FIXERS else ONE_BY_ONE}"
            )
