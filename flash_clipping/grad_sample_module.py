"""Flash clipping in the shape that Opacus expects of a grad sample module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal, get_args

import torch
from opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flash_clipping.clipping import check_clipping, clipping_coefficients, total_norm
from flash_clipping.errors import FlashClippingError
from flash_clipping.inputs import batched_inputs
from flash_clipping.ops.backend import BACKENDS
from flash_clipping.recorder import Captured, Forward, Recorder
from flash_clipping.rows import may_tell_more, rehearse
from flash_clipping.rules import find_rule, find_scope
from flash_clipping.tap import PARAMETER_CONTAINERS, ScopedForward, Tap, owned_parameters
from flash_clipping.tape import Tape
from flash_clipping.two_pass import TwoPassForward

Mode = Literal["one_pass", "two_pass"]

#: Layers whose output for one sample depends on the others.
_MIXING_LAYERS = (nn.modules.batchnorm._BatchNorm,)

#: Layers that read their parameters past any stand-in, and what to use instead.
_REPLACED_LAYERS = {nn.LSTM: "DPLSTM", nn.GRU: "DPGRU", nn.RNN: "DPRNN"}


class GradSampleHooksFlashClipping(GradSampleHooksFastGradientClipping):
    """Flash clipping on a model that is used as it is (Opacus' ``wrap_model=False``).

    After ``loss.backward()``, ``get_norm_sample()`` and ``get_clipping_coef()`` are the norms and
    clipping coefficients of all samples, and every ``p.grad`` holds the clipped sum
    ``sum_b coef_b g_b``, where ``g_b`` is the gradient of sample ``b``'s own loss. This is what
    Opacus' ghost clipping leaves for ``DPOptimizerFastGradientClipping``, after one backward.

    Args:
        m: the model. Every trainable parameter in it is covered.
        batch_first: samples are axis 0 of the input of every layer; otherwise axis 1.
        loss_reduction: ``"mean"`` or ``"sum"``: how the loss reduces over samples.
        strict: as in Opacus: refuse trainable layers that have buffers.
        force_functorch: use the generic rule for every layer.
        max_grad_norm: clipping bound ``C``; a list with one bound per trainable parameter for
            ``clipping="per_layer"``.
        use_ghost_clipping: accepted for compatibility; norms are exact either way.
        backend: ``"auto"`` (Triton for CUDA tensors where it works), ``"triton"`` or ``"torch"``;
            the environment variable ``FLASH_CLIPPING_BACKEND`` overrides ``"auto"``.
        mode: ``"one_pass"`` keeps every layer's input and output gradient until the coefficients
            are known. ``"two_pass"`` keeps nothing and runs backward twice: for models under
            activation checkpointing that would not fit otherwise.
        clipping: ``"flat"``, ``"per_layer"`` or ``"automatic"``
            (:func:`~flash_clipping.clipping.clipping_coefficients`).
        folded_modules: names of modules, as shell patterns (``"layers.*.attention*"``), that see
            several rows per sample along the batch axis: windows folded into the batch, say. All
            rows of one sample must lie together, and every sample must have as many. Modules
            below a named one are meant too.

    Guarantees:
        For any batch and any sample removed from it, ``sum_b coef_b g_b`` changes by at most
        ``max_grad_norm`` (1 + 1e-5) in fp32, and up to the rounding of the gradient's dtype below
        that. A sample whose gradient is not finite adds nothing. Results are bitwise equal from
        run to run. No step waits for the device.

    Raises:
        NotImplementedError: the model holds a layer that mixes samples (BatchNorm), or, if
            ``strict``, a trainable layer with buffers.
        FlashClippingError: in forward or backward, where a norm would be wrong.
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        max_grad_norm: float | Sequence[float] = 1.0,
        use_ghost_clipping: bool = True,
        backend: str = "auto",
        mode: Mode = "one_pass",
        clipping: str = "flat",
        folded_modules: Sequence[str] = (),
    ):
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(
                f"loss_reduction={loss_reduction!r} is unknown; expected 'mean' or 'sum'."
            )
        if mode not in get_args(Mode):
            raise ValueError(
                f"mode={mode!r} is unknown; expected one of {', '.join(get_args(Mode))}."
            )
        if backend not in BACKENDS:
            raise ValueError(
                f"backend={backend!r} is unknown; expected one of {', '.join(BACKENDS)}."
            )
        check_clipping(clipping)
        _refuse(m)  # before Opacus says that the layer has buffers
        self.mode = mode
        self.backend = backend
        self.clipping = clipping
        self.folded_modules = tuple(folded_modules)
        #: Backward passes whose clipped sums nobody has taken yet.
        self._backwards = 0
        #: Whether norms were taken since the optimizer last took gradients.
        self._clipped = False
        #: Called with the norms [B] before coefficients are taken: adaptive clipping.
        self.before_clipping: Callable[[Tensor], None] | None = None
        self._taps: list[Tap] = []
        #: Modules that hold parameters, in the model's order.
        self._owners = [module for module in m.modules() if module._parameters]
        self._recorder = Recorder(
            tape_class=Tape,
            clip=self._clip,
            trainable=self._trainable,
            state=self._state,
            loss_reduction=loss_reduction,
            batch_first=batch_first,
            backend=backend,
        )
        GradSampleHooksFastGradientClipping.__init__(
            self,
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
            max_grad_norm=max_grad_norm,
            use_ghost_clipping=use_ghost_clipping,
        )

    # -- installation -------------------------------------------------------------------------

    def add_hooks(
        self,
        *,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        force_functorch: bool = False,
    ) -> None:
        """Tap every layer that owns parameters, and watch the root module's inputs and outputs."""
        root = self._module
        if hasattr(root, "autograd_grad_sample_hooks"):
            raise ValueError("Trying to add hooks twice to the same model")
        _refuse(root)
        # Opacus' users and tests find the handles under this name.
        root.autograd_grad_sample_hooks = []
        self.autograd_grad_sample_hooks = root.autograd_grad_sample_hooks
        self._taps = list(plan_taps(root, self._recorder, force_functorch, self.folded_modules))
        for tap in self._taps:
            tap.install()
        if self.mode == "two_pass":
            self._taps.append(TwoPassForward(root, self._recorder))
            self._taps[-1].install()
        handles = self.autograd_grad_sample_hooks
        handles.append(root.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        handles.append(root.register_forward_hook(self._after_forward, with_kwargs=True))
        self._guarded: dict[int, nn.Parameter] = {}
        self._guard_parameters()
        self.enable_hooks()

    def remove_hooks(self) -> None:
        """Take off all taps and hooks; the model is as it was."""
        while self._taps:
            self._taps.pop().remove()
        self._guarded = {}
        super().remove_hooks()

    def enable_hooks(self) -> None:
        """Record backward passes: they leave norms, coefficients and clipped sums."""
        super().enable_hooks()
        self._recorder.enabled = True

    def disable_hooks(self) -> None:
        """Leave backward passes alone: they give ordinary gradients."""
        super().disable_hooks()
        self._recorder.enabled = False

    def _guard_parameters(self) -> None:
        """Refuse gradients that reach a parameter past its tap: they would not be clipped."""
        guarded = self._guarded
        new = {
            id(param): param
            for owner in self._owners
            for param in owner._parameters.values()
            if param is not None and id(param) not in guarded and param.requires_grad
        }
        if not new:
            return
        names = {id(param): name for name, param in self._module.named_parameters()}
        for key, param in new.items():
            guarded[key] = param
            handle = param.register_hook(_Guard(names[key], self._recorder))
            self.autograd_grad_sample_hooks.append(handle)

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._recorder.enabled:
            return
        recorder = self._recorder
        self._guard_parameters()
        may_rehearse = recorder.may_rehearse()
        if may_rehearse and (
            recorder.rehearsed != len(self._guarded) or may_tell_more(recorder, args, kwargs)
        ):
            rehearse(module, self._own_forward(module), recorder, args, kwargs)
            recorder.rehearsed = len(self._guarded)
        module_call = recorder.begin_forward(batched_inputs(args, kwargs))
        recorder.check_drawn(module_call)
        # Until the outputs hold it, the call is held here; a failed forward leaves only this.
        self._call: Forward | None = module_call

    @staticmethod
    def _own_forward(module: nn.Module) -> Callable[..., Any]:
        forward = module.forward
        return forward.original if isinstance(forward, TwoPassForward) else forward

    def expect_samples(self, n: int | None) -> None:
        """Tell how many samples the loader drew for the next forward.

        From now on, a forward that records gradients must be called with that many samples, until
        another number is given; ``None`` if it is not known.

        Raises:
            FlashClippingError: in forward, where the model is called with a batch of another size.
        """
        self._recorder.drawn = n

    def check_losses(self, losses: Tensor) -> None:
        """Refuse per-sample losses that are not as many as the samples of the last forward.

        Raises:
            FlashClippingError: what was taken for samples is something else.
        """
        self._recorder.check_losses(losses)

    def _after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        call, self._call = getattr(self, "_call", None), None
        if call is None or not torch.is_grad_enabled():
            return
        call.end()
        recorder = self._recorder
        if call.guesses:
            rehearse(module, self._own_forward(module), recorder, args, kwargs, call)
        if self.mode == "two_pass":
            return

        def start_backward(grad: Tensor, call: Forward = call) -> None:
            if recorder.enabled:
                recorder.begin_backward()

        for leaf in _tensors(output):
            if leaf.requires_grad:
                leaf.register_hook(start_backward)

    def set_grad_sample_to_none(self) -> None:
        """Gradients are being cleared; there is never a ``p.grad_sample`` to clear."""
        self._backwards = 0

    # -- norms and coefficients ---------------------------------------------------------------

    @property
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that are trainable now, in the model's order."""
        # Not named_parameters(): walking the module tree takes milliseconds in every step.
        found: dict[int, nn.Parameter] = {}
        for owner in self._owners:
            for param in owner._parameters.values():
                if param is not None and param.requires_grad:
                    found[id(param)] = param
        return list(found.values())

    @trainable_parameters.setter
    def trainable_parameters(self, value: Any) -> None:
        """Opacus assigns the list once; ours follows ``requires_grad``."""

    def _trainable(self) -> list[nn.Parameter]:
        return self.trainable_parameters

    def _state(self) -> Iterator[Tensor]:
        return chain(self._module.parameters(), self._module.buffers())

    def _clip(self, params: list[nn.Parameter], norms_PB: Tensor, one_device: bool) -> Tensor:
        """Publish the norms of one backward; return its coefficients."""
        total_B = self._publish(params, norms_PB, one_device)
        if (captured := self._recorder.captured) is not None:
            if self.before_clipping is not None:
                raise FlashClippingError(
                    "A backward pass that moves its own bound (clipping='adaptive') is being "
                    "captured as a CUDA graph, whose replays would all clip by today's. Run it "
                    "without flash_clipping.GraphedStep."
                )
            captured.norms.append((params, norms_PB))  # every replay counts, and publishes its own
            return clipping_coefficients(norms_PB, self.max_grad_norm, self.clipping, total_B)
        self._count_backward()
        if self.before_clipping is not None:
            self.before_clipping(total_B)
        return clipping_coefficients(norms_PB, self.max_grad_norm, self.clipping, total_B)

    @contextmanager
    def captures(self) -> Iterator[Captured]:
        """Let backward passes be captured as a CUDA graph. What reads norms meanwhile reads those
        that replays will write; afterwards the norms are again those from before."""
        params = self.trainable_parameters
        before = [getattr(param, "_norm_sample", None) for param in params]
        total_B: Any = getattr(self, "per_sample_gradient_norms", None)
        try:
            with self._recorder.captures() as captured:
                yield captured
        finally:
            for param, norm_B in zip(params, before, strict=True):
                setattr(param, "_norm_sample", norm_B)  # noqa: B010
            self.per_sample_gradient_norms = total_B

    def take_over(self, captured: Captured) -> None:
        """Leave what the backward passes of a replayed CUDA graph would have left."""
        for params, norms_PB in captured.norms:
            self._publish(params, norms_PB.clone())
            self._count_backward()
        for coef in captured.coefs:
            self._recorder.note_non_finite(coef)

    def _publish(
        self, params: list[nn.Parameter], norms_PB: Tensor, one_device: bool = False
    ) -> Tensor:
        """Leave the norms where they are looked for; ``[B]``, those over all."""
        index = norms_PB.get_device()
        near = one_device and params[0].get_device() == index
        for param, norm_B in zip(params, norms_PB.unbind(0), strict=True):
            if not near and param.get_device() != index:
                norm_B = norm_B.to(param.device)
            # Where Opacus' users look for the norm of one parameter's gradients.
            setattr(param, "_norm_sample", norm_B)  # noqa: B010
        total_B = self.per_sample_gradient_norms = total_norm(norms_PB)
        return total_B

    def _count_backward(self) -> None:
        self._backwards += 1
        self._clipped = True
        if self._backwards > 1 and not self.grad_accumulation_allowed:
            raise ValueError(
                "Poisson sampling is not compatible with grad accumulation. You need to call "
                "optimizer.step() after every forward/backward pass or consider using "
                "BatchMemoryManager"
            )

    @property
    def backward_count(self) -> int:
        """Backward passes whose clipped sums nobody has taken yet."""
        return self._backwards

    def take_backward_count(self) -> int:
        """Backward passes recorded since this was last asked, or gradients were cleared."""
        count, self._backwards = self._backwards, 0
        return count

    def take_clipped(self) -> bool:
        """Whether a clipped backward was recorded since this was last asked."""
        clipped, self._clipped = self._clipped, False
        return clipped

    def get_norm_sample(self) -> Tensor:
        """Norm of every sample's gradient over all trainable parameters: fp32 ``[B]``.

        fp64 for a model in float64.

        Raises:
            FlashClippingError: no backward pass has been recorded yet.
        """
        norm_B = total_norm(self._norms())
        self.per_sample_gradient_norms = norm_B
        return norm_B

    def get_clipping_coef(self) -> Tensor:
        """Clipping coefficient of every sample: fp32 ``[B]`` (``[P, B]`` when per layer).

        Follows ``max_grad_norm`` as it is now. Never NaN; 0 for a sample that is not finite.

        Raises:
            FlashClippingError: no backward pass has been recorded yet.
        """
        return clipping_coefficients(self._norms(), self.max_grad_norm, self.clipping)

    def _norms(self) -> Tensor:
        rows = [getattr(param, "_norm_sample", None) for param in self.trainable_parameters]
        found = [row for row in rows if row is not None]
        if not found or len(found) < len(rows):
            raise FlashClippingError(
                "There are no per-sample norms yet: they are taken during backward. Call the "
                "model, then loss.backward(), with hooks enabled, and ask again."
            )
        return torch.stack([row.to(found[0].device) for row in found])


def _refuse(root: nn.Module) -> None:
    """Refuse layers that no clipping can bound, or that no tap can serve."""
    for path, module in root.named_modules():
        if isinstance(module, _MIXING_LAYERS):
            raise NotImplementedError(
                f"{path} ({type(module).__name__}) mixes samples: the gradient of one sample "
                "depends on the others, so no clipping can bound it. Replace it by "
                "nn.GroupNorm (opacus.validators.ModuleValidator.fix(model) does)."
            )
        if isinstance(module, DistributedDataParallel):
            raise NotImplementedError(
                f"{path or 'the model'}: torch's DistributedDataParallel reduces gradients "
                "before they are clipped. Wrap the model in opacus.distributed."
                "DifferentiallyPrivateDistributedDataParallel instead."
            )
        if type(module) in _REPLACED_LAYERS:
            raise NotImplementedError(
                f"{path} ({type(module).__name__}) has no per-sample gradients. Replace it by "
                f"opacus.layers.{_REPLACED_LAYERS[type(module)]}, which takes its state dict "
                "(opacus.validators.ModuleValidator.fix(model) does)."
            )


class GradSampleModuleFlashClipping(
    GradSampleHooksFlashClipping, GradSampleModuleFastGradientClipping
):
    """Flash clipping around a model (Opacus' ``wrap_model=True``).

    See :class:`GradSampleHooksFlashClipping` for arguments, guarantees and errors. State dicts
    have Opacus' ``_module.`` prefix; ``to_standard_module()`` gives the model back as it was.
    """

    def __init__(self, m: nn.Module, **kwargs: Any):
        nn.Module.__init__(self)
        GradSampleHooksFlashClipping.__init__(self, m, **kwargs)
        self.grad_accumulation_hook = None


class _Guard:
    """Tensor hook of one parameter: a gradient that arrives here went past the parameter's tap."""

    def __init__(self, name: str, recorder: Recorder):
        self.name = name
        self.recorder = recorder

    def __call__(self, grad: Tensor | None) -> None:
        if grad is not None and self.recorder.enabled:
            raise FlashClippingError(
                f"{self.name}: this parameter received a gradient from outside the module that "
                "owns it; it would be added without being clipped. Use the parameter inside its "
                "own module's forward, detach it where it is used elsewhere, or, for a penalty on "
                "weights, use the optimizer's weight_decay."
            )


def plan_taps(
    root: nn.Module,
    recorder: Recorder,
    force_generic: bool = False,
    folded_modules: Sequence[str] = (),
) -> Iterator[Tap]:
    """A tap for every module that owns parameters directly.

    A container of parameters (``nn.ParameterList``) has no forward: it belongs to its parent.
    """
    paths = [path for path, _ in root.named_modules()]
    folded: set[str] = set()
    for pattern in folded_modules:
        named = [path for path in paths if fnmatchcase(path, pattern)]
        if not named:
            raise ValueError(
                f"folded_modules: no module is named like {pattern!r}. Names look like "
                f"{', '.join(repr(path) for path in paths[1:4])}."
            )
        folded |= {p for name in named for p in paths if p == name or p.startswith(f"{name}.")}
    for path, module in root.named_modules():
        if isinstance(module, PARAMETER_CONTAINERS):
            continue
        if (scope := find_scope(module)) is not None:
            # Before parameters: Opacus' recurrent layers own aliases of their cells'.
            yield ScopedForward(module, path, scope, recorder)
        elif owned_parameters(module):
            rule = None if force_generic else find_rule(module)
            yield Tap(module, path, rule, recorder, force_generic, path in folded)


def _tensors(output: Any) -> list[Tensor]:
    """The tensors in a model's output: nested containers, mappings and dataclasses alike."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    elif hasattr(output, "__dataclass_fields__"):
        output = list(vars(output).values())
    if isinstance(output, list | tuple):
        return [tensor for part in output for tensor in _tensors(part)]
    return []
