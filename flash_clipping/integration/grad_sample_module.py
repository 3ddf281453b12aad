"""Flash clipping in the shape that Opacus expects of a grad sample module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal, NoReturn, get_args

import torch
from opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import is_lazy

from flash_clipping._compat import BATCH_NORMS
from flash_clipping.capture.batch_axis import may_tell_more, rehearse
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.inputs import batched_inputs, tensors_in
from flash_clipping.capture.max_norm import embeddings_of, refuse_max_norm
from flash_clipping.capture.no_samples import EmptyBatchForward
from flash_clipping.capture.regions import Regions, compiler_of
from flash_clipping.capture.session import ClippingSession, GraphedResults
from flash_clipping.capture.tap import PARAMETER_CONTAINERS, ScopedForward, Tap, owned_parameters
from flash_clipping.capture.two_pass import TwoPassForward
from flash_clipping.errors import FlashClippingError
from flash_clipping.finish.clipping import Doubts, check_clipping, clipping_coefficients, total_norm
from flash_clipping.integration.parallel import (
    refuse_around,
    refuse_inside,
    refuse_new_class,
    refuse_since,
)
from flash_clipping.integration.step_record import Bound, StepRecord, added, checked_bound
from flash_clipping.integration.structure import Structure
from flash_clipping.ops.runtime.backend import BACKENDS
from flash_clipping.rules import find_rule, find_scope

Mode = Literal["one_pass", "two_pass"]

#: What clipped sums are left in: fp32, or the parameter's own dtype.
SUM_DTYPES = ("float32", "parameter")

#: Layers whose output for one sample depends on the others.
_MIXING_LAYERS = BATCH_NORMS

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
            (:func:`~flash_clipping.finish.clipping.clipping_coefficients`).
        folded_modules: names of modules, as shell patterns (``"layers.*.attention*"``), that see
            several rows per sample along the batch axis: windows folded into the batch, say. All
            rows of one sample must lie together, and every sample must have as many. Modules
            below a named one are meant too.
        sum_dtype: of clipped sums in ``p.grad``. ``"float32"`` (float64 for float64 parameters)
            rounds once, after the noise. ``"parameter"`` rounds every sum to the parameter's dtype
            before the noise, which saves memory and weakens privacy: with bfloat16 parameters, one
            of ``k`` samples with aligned gradients changes the sum by up to ``k / 128`` times
            ``max_grad_norm``, where the noise is for one.

    Guarantees:
        For any batch and any sample removed from it, ``sum_b coef_b g_b`` changes by at most
        ``max_grad_norm`` (1 + 1e-4), besides fp32's own rounding of the sum; with
        ``sum_dtype="parameter"``, besides that of the parameter's dtype.
        A sample whose gradient is not finite adds nothing. Results are bitwise equal from
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
        sum_dtype: str = "float32",
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
        if sum_dtype not in SUM_DTYPES:
            raise ValueError(
                f"sum_dtype={sum_dtype!r} is unknown; expected one of {', '.join(SUM_DTYPES)}."
            )
        check_clipping(clipping)
        _refuse(m)  # before Opacus says that the layer has buffers
        self.mode = mode
        self.backend = backend
        self.clipping = clipping
        self.sum_dtype = sum_dtype
        self.folded_modules = tuple(folded_modules)
        #: Clipped backward passes since the model was wrapped.
        self.clipped_backwards = 0
        #: Whether steps count the samples within the bound: adaptive clipping.
        self.counts_unclipped = False
        self._bound: Bound = 1.0
        #: Of the sums that backward left in ``p.grad`` and nobody has taken yet.
        self._record: StepRecord | None = None
        #: What ``p.grad`` holds that is known: clipped sums, or zeros; by the parameter's id the
        #: tensor and its version.
        self._left: dict[int, weakref.ref[Tensor]] = {}
        self._versions: dict[int, int] = {}
        #: Parameters whose ``p.grad`` held something else when the last sums were added to it.
        self._foreign: set[int] = set()
        self._follower: weakref.ref[Any] | None = None
        #: What the samples of the last backward were clipped by: at least the norms of what is
        #: released of them, ``[B]``, or ``[P, B]`` when per layer.
        self._upper_bounds: Tensor | None = None
        self._taps: list[Tap] = []
        #: Modules that hold parameters, in the model's order.
        self._owners = [module for module in m.modules() if module._parameters]
        self._session = ClippingSession(
            clip=self._clip,
            note_sums=self.note_sums,
            trainable=self._trainable,
            state=self._state,
            loss_reduction=loss_reduction,
            batch_first=batch_first,
            backend=backend,
            sum_dtype=sum_dtype,
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
            raise ValueError(
                "Trying to add hooks twice to the same model. One model has one optimizer, with "
                "a parameter group for whatever needs settings of its own. To start afresh, take "
                "the hooks off first: to_standard_module(), or cleanup() with wrap_model=False."
            )
        _refuse(root)
        # Opacus' users and tests find the handles under this name.
        root.autograd_grad_sample_hooks = []
        self.autograd_grad_sample_hooks = root.autograd_grad_sample_hooks
        self._taps = list(plan_taps(root, self._session, force_functorch, self.folded_modules))
        for tap in self._taps:
            tap.install()
        self._regions = Regions(root, self._session, self._taps)
        has_bags = any(isinstance(tap.layer, nn.EmbeddingBag) for tap in self._taps)
        self._root_forward = EmptyBatchForward(root, self._session, has_bags)
        self._taps.append(self._root_forward)
        self._root_forward.install()
        self._regions.find(self._root_forward)
        if self.mode == "two_pass":
            self._taps.append(TwoPassForward(root, self._session))
            self._taps[-1].install()
        handles = self.autograd_grad_sample_hooks
        handles.append(root.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        handles.append(root.register_forward_hook(self._after_forward, with_kwargs=True))
        handles.append(root.register_forward_hook(self._leave_forward, always_call=True))
        self._guarded: dict[int, nn.Parameter] = {}
        #: Parameters whose gradients had to have a dtype before, and which.
        self._grad_dtypes: list[tuple[nn.Parameter, torch.dtype | None]] = []
        self._embeddings = embeddings_of(root)
        #: Whether forward has looked for what happened to the parameters after wrapping.
        self._looked_around = False
        self._guard_parameters()
        self._structure = Structure(self if isinstance(self, nn.Module) else root)
        self.enable_hooks()

    def remove_hooks(self) -> None:
        """Take off all taps and hooks; the model is as it was."""
        self._regions.remove()
        while self._taps:
            self._taps.pop().remove()
        self._guarded = {}
        while self._grad_dtypes:
            param, dtype = self._grad_dtypes.pop()
            if param.grad is None or dtype in (None, param.grad.dtype):
                param.grad_dtype = dtype
        self._record, self._left, self._follower = None, {}, None
        super().remove_hooks()

    def enable_hooks(self) -> None:
        """Record backward passes: they leave norms, coefficients and clipped sums."""
        super().enable_hooks()
        self._session.enabled = True

    def disable_hooks(self) -> None:
        """Leave backward passes alone: they give ordinary gradients."""
        super().disable_hooks()
        self._session.enabled = False

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model's forward and backward, with arguments as of ``torch.compile``.

        What clipping needs leaves the compiled graphs as outputs
        (:mod:`flash_clipping.capture.wires` tells what layers that serves), so that
        ``fullgraph=True`` works wherever it does for the plain model. Norms and clipped sums are
        those of the model that is not compiled.
        """
        self._regions.compile(self._root_forward, compiler_of(args, kwargs))

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
        self._looked_around = False
        names = {id(param): name for name, param in self._module.named_parameters()}
        for key, param in new.items():
            _refuse_complex(names[key], param)
            guarded[key] = param
            self._allow_sums(names[key], param)
            handle = param.register_hook(_Guard(names[key], key, self._session))
            self.autograd_grad_sample_hooks.append(handle)

    def _allow_sums(self, name: str, param: nn.Parameter) -> None:
        """Let ``param.grad`` hold sums in fp32."""
        if param.dtype not in (torch.bfloat16, torch.float16) or self.sum_dtype == "parameter":
            return
        if not hasattr(param, "grad_dtype"):
            raise NotImplementedError(
                f"{name}: is in {param.dtype}, and this PyTorch ({torch.__version__}) allows no "
                "gradient in another dtype: its clipped sums would be rounded before noise is "
                "added. Use a PyTorch whose tensors have grad_dtype (2.10 or newer), keep the "
                "parameters in float32 (with autocast), or pass sum_dtype='parameter', which "
                "weakens privacy."
            )
        self._grad_dtypes.append((param, param.grad_dtype))
        param.grad_dtype = None  # any

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._session.enabled:
            return
        session = self._session
        session.enter_forward()
        refuse_around(module)
        refuse_max_norm(self._embeddings)
        self._guard_parameters()
        if not self._looked_around:
            session.recover()  # no stand-in of a failed step may be in the way
            refuse_since(self if isinstance(self, nn.Module) else module)
            if not is_dynamo_compiling():
                self._regions.find(self._root_forward)  # blocks that were compiled since
            self._looked_around = True
        may_rehearse = session.may_rehearse()
        if may_rehearse and (
            session.rehearsed != len(self._guarded) or may_tell_more(session, args, kwargs)
        ):
            with self._regions.as_compiled():
                rehearse(module, self._own_forward(module), session, args, kwargs)
            session.rehearsed = len(self._guarded)
        module_call = session.begin_forward(batched_inputs(args, kwargs))
        session.check_drawn(module_call)
        # Until the outputs hold it, the call is held here; a failed forward leaves only this.
        self._call: ForwardCall | None = module_call

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
        self._session.drawn = n

    def check_losses(self, losses: Tensor) -> None:
        """Refuse per-sample losses that are not as many as the samples of the last forward.

        Raises:
            FlashClippingError: what was taken for samples is something else.
        """
        self._session.check_losses(losses)

    def _after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        call, self._call = getattr(self, "_call", None), None
        if call is None or not torch.is_grad_enabled():
            return
        self._structure.check()
        call.end()
        session = self._session
        if call.guesses:
            with self._regions.as_compiled():
                rehearse(module, self._own_forward(module), session, args, kwargs, call)
        if self.mode == "two_pass":
            return

        def start_backward(grad: Tensor, call: ForwardCall = call) -> None:
            if session.enabled:
                session.begin_backward(call)

        for leaf in tensors_in(output):
            if leaf.requires_grad:
                leaf.register_hook(start_backward)

    def _leave_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """The root's forward has ended, or failed."""
        self._session.leave_forward()

    def set_grad_sample_to_none(self) -> None:
        """Gradients are being cleared; there is never a ``p.grad_sample`` to clear."""
        self._record, self._left = None, {}

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

    def _clip(
        self, params: list[nn.Parameter], norms_PB: Tensor, doubts: Doubts, one_device: bool
    ) -> Tensor:
        """Publish the norms of one backward; return its coefficients, which are by upper bounds of
        what is released (:mod:`flash_clipping.ops.certificate`)."""
        captured = self._session.captured
        if captured is None:
            self._begin_sums(params)
        total_B = self._publish(params, norms_PB, one_device)
        if self.clipping == "per_layer":
            upper = doubts.bound_each([id(param) for param in params], norms_PB)
        else:
            upper = doubts.bound_total(total_B)
        self._upper_bounds = upper
        if captured is not None:
            captured.norms.append((params, norms_PB, upper))  # every replay publishes its own
        else:
            self._count_backward(total_B)
        return self._coefficients(upper)

    @contextmanager
    def summed_loss(self) -> Iterator[bool]:
        """Take the gradients of a backward pass for samples' own, whatever ``loss_reduction`` says.

        Yields whether that is so: with hooks disabled gradients are left alone, and so must the
        loss be.
        """
        session = self._session
        before = session.loss_reduction
        if session.enabled:
            session.loss_reduction = "sum"
        try:
            yield session.enabled
        finally:
            session.loss_reduction = before

    def _coefficients(self, upper: Tensor) -> Tensor:
        """``[B]`` from bounds of samples, ``[P, B]`` from bounds of their parameters' gradients."""
        norms_PB = upper if self.clipping == "per_layer" else upper.unsqueeze(0)
        total_B = None if self.clipping == "per_layer" else upper
        return clipping_coefficients(norms_PB, self._bound, self.clipping, total_B)

    @contextmanager
    def captures(self) -> Iterator[GraphedResults]:
        """Let backward passes be captured as a CUDA graph. What reads norms meanwhile reads those
        that replays will write; afterwards the norms are again those from before."""
        params = self.trainable_parameters
        before = [getattr(param, "_norm_sample", None) for param in params]
        total_B: Any = getattr(self, "per_sample_gradient_norms", None)
        upper = self._upper_bounds
        try:
            with self._session.captures() as captured:
                yield captured
        finally:
            for param, norm_B in zip(params, before, strict=True):
                setattr(param, "_norm_sample", norm_B)  # noqa: B010
            self.per_sample_gradient_norms = total_B
            self._upper_bounds = upper

    def take_over(self, captured: GraphedResults) -> None:
        """Leave what the backward passes of a replayed CUDA graph would have left."""
        for number, (params, norms_PB, upper) in enumerate(captured.norms):
            if not number:
                self._begin_sums(params)
            self._upper_bounds = upper.clone()
            self._count_backward(self._publish(params, norms_PB.clone()))
        for coef in captured.coefs:
            self._session.note_non_finite(coef)

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

    # -- the running step ---------------------------------------------------------------------

    @property
    def max_grad_norm(self) -> Any:
        """Clipping bound; a list with one for each trainable parameter when per layer.

        The optimizer's is the same one: whichever is set, both change. It may be set at any time,
        and applies from the next step on: a backward pass that would go on with a step by another
        bound is an error, and noise is for the bound that the step was clipped by.

        Raises:
            ValueError: when set to what is no positive number.
        """
        return self._bound

    @max_grad_norm.setter
    def max_grad_norm(self, value: Any) -> None:
        self._bound = checked_bound(value)

    @property
    def follower(self) -> Any:
        """The optimizer that adds noise to this model's sums, or ``None``."""
        return None if self._follower is None else self._follower()

    @follower.setter
    def follower(self, optimizer: Any) -> None:
        self._follower = weakref.ref(optimizer)

    @property
    def backward_count(self) -> int:
        """Backward passes whose clipped sums nobody has taken yet."""
        return 0 if self._record is None else self._record.backwards

    def _is_left(self, param: nn.Parameter, grad: Tensor) -> bool:
        """Whether ``p.grad`` is the tensor that was left there, unchanged."""
        key = id(param)
        left = self._left.get(key)
        return left is not None and left() is grad and self._versions[key] == grad._version

    def _begin_sums(self, params: list[nn.Parameter]) -> None:
        """Look at what sums will be added to; refuse a backward pass that cannot go on with it."""
        held = [(param, param.grad) for param in params if param.grad is not None]
        foreign = {id(param) for param, grad in held if not self._is_left(param, grad)}
        running = self._record
        if len(foreign) == len(held):  # whatever was left was taken away by hand
            running = None
        before = running
        if before is None and (follower := self.follower) is not None:
            before = follower.step_record
        if before is not None:
            before.check_same_bound(self._bound_now(), self.clipping)
        if running is not None and running.backwards and not self.grad_accumulation_allowed:
            raise ValueError(
                "Poisson sampling is not compatible with grad accumulation. You need to call "
                "optimizer.step() after every forward/backward pass or consider using "
                "BatchMemoryManager"
            )
        # Nothing is known of p.grad until the sums are in: a failure here leaves it so.
        self._record, self._left, self._foreign = running, {}, foreign

    def _bound_now(self) -> float | tuple[float, ...]:
        return tuple(self._bound) if isinstance(self._bound, list) else self._bound

    def _count_backward(self, total_B: Tensor) -> None:
        """Add a clipped backward pass to the running step's record."""
        self.clipped_backwards += 1
        record = self._record or StepRecord(self._bound_now(), self.clipping, backwards=0)
        unclipped = record.unclipped
        if self.counts_unclipped:
            within = (total_B <= record.sensitivity).sum(dtype=torch.float64) - total_B.numel() / 2
            unclipped = added(unclipped, within)
        self._record = replace(record, backwards=record.backwards + 1, unclipped=unclipped)

    def note_sums(self, params: Iterable[nn.Parameter]) -> None:
        """Remember what ``p.grad`` is now that the sums of these parameters are in."""
        if self._session.captured is None:
            self._remember([param for param in params if id(param) not in self._foreign])

    def note_cleared(self, params: Iterable[nn.Parameter]) -> None:
        """Gradients were cleared: those of these parameters that are there are zero."""
        self._record = None
        self._remember(params)

    def _remember(self, params: Iterable[nn.Parameter]) -> None:
        params = [param for param in params if param.grad is not None]
        grads: list[Any] = [param.grad for param in params]
        keys = [*map(id, params)]
        self._left = dict(zip(keys, map(weakref.ref, grads), strict=True))
        self._versions = dict(zip(keys, [grad._version for grad in grads], strict=True))

    def note_moved(self, param: nn.Parameter, before: Tensor) -> None:
        """``p.grad`` is a copy of what it was, made by this library."""
        if (left := self._left.get(id(param))) is not None and left() is before:
            assert param.grad is not None
            self._left[id(param)] = weakref.ref(param.grad)
            self._versions[id(param)] = param.grad._version

    def pending_record(self, params: Sequence[nn.Parameter]) -> StepRecord:
        """The record of the sums in ``p.grad`` of these parameters, if that is what is there.

        Raises:
            ValueError: there was no clipped backward pass, or some ``p.grad`` is not what it left.
        """
        record = self._record
        if record is None or not record.backwards:
            raise ValueError(
                "No clipped backward pass was recorded since the last step: p.grad is not a "
                "clipped sum. Call loss.backward() with hooks enabled (module.enable_hooks()) "
                "before optimizer.step()."
            )
        for param in params:
            if param.grad is None or not self._is_left(param, param.grad):
                self._refuse_grad(param)
        return replace(record, params=frozenset(map(id, params)))

    def forget_record(self) -> None:
        """The sums in ``p.grad`` were taken."""
        self._record, self._left = None, {}

    def _refuse_grad(self, param: nn.Parameter) -> NoReturn:
        name = self.name_of(param)
        if name is None:
            raise ValueError(
                f"The optimizer has a parameter of shape {tuple(param.shape)} that the wrapped "
                "model has not, or had not when it was wrapped: its gradient is not clipped. Wrap "
                "the model when it is complete, and give the optimizer its parameters."
            )
        if param.grad is None:
            raise ValueError(
                f"{name}: this parameter has no clipped sum; its p.grad is None. Call "
                "loss.backward() on the wrapped model's output before optimizer.step(), after "
                "freezing, unfreezing and clearing gradients. (backward(inputs=...) leaves sums in "
                "the named parameters only.)"
            )
        raise ValueError(
            f"{name}: its p.grad is not the clipped sum that backward() left, so noise for the "
            "clipping bound would not hide a sample. It was changed or replaced between backward() "
            "and step() (torch.nn.utils.clip_grad_norm_, a trainer's gradient clipping, p.grad += "
            "..., a backward() with hooks disabled), or was not cleared before. Leave p.grad alone "
            "(samples are clipped already; switch the trainer's clipping off), and clear gradients "
            "with optimizer.zero_grad()."
        )

    def name_of(self, param: nn.Parameter) -> str | None:
        """The parameter's name in the model; ``None`` for one that is not there."""
        for name, found in self._module.named_parameters():
            if found is param:
                return name
        return None

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of a wrapped model start between steps, with no optimizer.
        state = self.__dict__.copy()
        state.update(_record=None, _left={}, _versions={}, _foreign=set(), _follower=None)
        return state

    # -- asking for norms and coefficients ------------------------------------------------------

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

        Follows ``max_grad_norm`` as it is now. Never NaN; 0 for a sample that is not finite. May
        be below ``max_grad_norm / norm`` for a sample whose positions nearly cancel
        (:mod:`flash_clipping.ops.certificate`).

        Raises:
            FlashClippingError: no backward pass has been recorded yet.
        """
        self._norms()
        assert self._upper_bounds is not None
        return self._coefficients(self._upper_bounds)

    def _norms(self) -> Tensor:
        rows = [getattr(param, "_norm_sample", None) for param in self.trainable_parameters]
        found = [row for row in rows if row is not None]
        if not found or len(found) < len(rows):
            raise FlashClippingError(
                "There are no per-sample norms yet: they are taken during backward. Call the "
                "model, then loss.backward(), with hooks enabled, and ask again."
            )
        return torch.stack([row.to(found[0].device) for row in found])


def _refuse_complex(name: str, param: nn.Parameter) -> None:
    if param.requires_grad and param.is_complex():
        raise FlashClippingError(
            f"{name}: a complex parameter ({param.dtype}), whose clipped gradients and noise are "
            "not supported. Keep its real and imaginary parts in a real parameter, "
            "nn.Parameter(torch.view_as_real(w)), and use torch.view_as_complex(self.w) in "
            "forward, which is exact; or freeze it (requires_grad_(False))."
        )


def _refuse(root: nn.Module) -> None:
    """Refuse layers that no clipping can bound, or that no tap can serve."""
    refuse_max_norm(embeddings_of(root))
    for name, param in root.named_parameters():
        _refuse_complex(name, param)
    for path, module in root.named_modules():
        for name, param in module._parameters.items():
            if param is not None and is_lazy(param):
                raise NotImplementedError(
                    f"{path or 'the model'} ({type(module).__name__}): its parameter {name!r} has "
                    "no shape before the first forward, so nothing can be clipped or trained. Call "
                    "the model once on a batch (under torch.no_grad()), then make the optimizer "
                    "and wrap the model."
                )
        if isinstance(module, _MIXING_LAYERS):
            raise NotImplementedError(
                f"{path} ({type(module).__name__}) mixes samples: the gradient of one sample "
                "depends on the others, so no clipping can bound it. Replace it by "
                "nn.GroupNorm (opacus.validators.ModuleValidator.fix(model) does)."
            )
        refuse_inside(path, module)
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

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients of the model, as Opacus' wrapped modules do."""
        super().zero_grad(set_to_none)
        self.note_cleared(self._module.parameters())

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            refuse_new_class(self, value)
        super().__setattr__(name, value)


class _Guard:
    """Tensor hook of one parameter: a gradient that arrives here went past the parameter's tap."""

    def __init__(self, name: str, key: int, session: ClippingSession):
        self.name = name
        self.key = key
        self.session = session

    def __call__(self, grad: Tensor | None) -> None:
        if grad is None:  # a tap's word that it has the gradient; autograd was asked for it
            if (tape := self.session.tape) is not None:
                tape.asked.add(self.key)
        elif self.session.enabled:
            raise FlashClippingError(
                f"{self.name}: this parameter received a gradient from outside the module that "
                "owns it; it would be added without being clipped. Freeze it "
                "(requires_grad_(False)) and train adapters (LoRA on the model's linear layers) "
                "instead; or use it in its own module's forward, which others call; or detach it "
                "where it is used elsewhere. For a penalty on weights, use the optimizer's "
                "weight_decay. A weight that a hook computes (torch.nn.utils.weight_norm, "
                "spectral_norm) needs torch.nn.utils.parametrizations instead; after pruning, "
                "torch.nn.utils.prune.remove(module, name)."
            )


def plan_taps(
    root: nn.Module,
    session: ClippingSession,
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
            yield ScopedForward(module, path, scope, session)
        elif owned_parameters(module):
            rule = None if force_generic else find_rule(module)
            yield Tap(module, path, rule, session, force_generic, path in folded)
