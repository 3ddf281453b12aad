"""Flash clipping in the shape that Opacus expects of a grad sample module.

A step, in the order of the methods below: forward (who is a sample?), backward (taps record, the
session keeps), clip (norms to coefficients), and the norms and coefficients that users query. The
sums that the optimizer takes are described by :mod:`flash_clipping.engine.grad_ledger`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NoReturn, Unpack

import torch
from opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping.capture.batch_size_checks import check_losses, refuse_no_rows
from flash_clipping.capture.compiled.regions import compiler_of
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.inputs import batched_inputs, refuse_layout, tensors_in
from flash_clipping.capture.padding import EVERY_ROW, NO_ROW
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.two_pass import TwoWalks
from flash_clipping.distributed import sharded_model
from flash_clipping.engine import wings
from flash_clipping.engine.grad_ledger import GradLedger, Norms, checked_bound
from flash_clipping.engine.installed_taps import InstalledTaps
from flash_clipping.engine.loss_graph import LossLook
from flash_clipping.engine.model_watch import ModelParameters, ModelWatch
from flash_clipping.engine.module_proxy import ModuleProxy
from flash_clipping.engine.options import (
    Kernels,
    Mode,
    Reduction,
    WrapperOptions,
    check_options,
)
from flash_clipping.engine.sampling.units import Documents
from flash_clipping.engine.told_rows import Told, ToldRows
from flash_clipping.engine.unsupported import (
    refuse_export,
    refuse_one_by_one,
    refuse_replay,
    refuse_unsupported,
)
from flash_clipping.errors import HALVE_PARTS, InvalidValue
from flash_clipping.finish.clipping import (
    ClipOptions,
    Doubts,
    check_bounds,
    clipping_coefficients,
    total_norm,
)
from flash_clipping.ops.runtime.checks import device_checks

_NOTHING = Told()


def _plain_copy(owner: GradSampleHooksFlashClipping, memo: dict[int, Any]) -> nn.Module:
    """``copy.deepcopy`` of a wrapped model's root: a plain model (averages of weights, say), unless
    it is copied with its ``owner``."""
    if id(owner) not in memo:
        twin = copy.deepcopy(owner, memo)
        twin.remove_hooks()
        return twin._module
    root = owner._module
    own = vars(root).pop("__deepcopy__")  # or the root's own way of copying would not be found
    try:
        copied = copy.deepcopy(root, memo)
    finally:
        vars(root)["__deepcopy__"] = own
    vars(copied)["__deepcopy__"] = copy.deepcopy(own, memo)
    return copied


class GradSampleHooksFlashClipping(GradSampleHooksFastGradientClipping):
    """Flash clipping on a model that is used as it is (Opacus' ``wrap_model=False``).

    After ``loss.backward()``, ``get_norm_sample()`` and ``get_clipping_coef()`` are the norms and
    clipping coefficients of all samples. Every ``p.grad`` holds the clipped sum
    ``sum_b coef_b g_b``, where ``g_b`` is the gradient of sample ``b``'s own loss: what Opacus'
    ghost clipping leaves for ``DPOptimizerFastGradientClipping``, after one backward.

    Args:
        m: the model. Every trainable parameter in it is covered.
        batch_first: samples are axis 0 of the input of every layer; otherwise axis 1.
        loss_reduction: ``"mean"`` or ``"sum"``: how the loss reduces over samples.
        strict: refuse buffers that forward changes: what they keep of samples gets no noise. Opacus
            refuses all buffers of trainable layers; here constants pass.
        force_functorch: use no rules: every function goes backward separately for each
            sample, under ``torch.func.vmap``. Exact, and slow.
        use_ghost_clipping: accepted, as Opacus has it; norms are exact either way.
        max_grad_norm: clipping bound ``C``; a list with one bound per trainable parameter for
            ``clipping="per_layer"``.
        kernels: what computes (:class:`~flash_clipping.Kernels`).
        mode: ``"one_pass"`` keeps every layer's input and output gradient until the coefficients
            are known. ``"two_pass"`` keeps a few and runs backward twice: for models under
            activation checkpointing that would not fit otherwise. ``"one_by_one"`` runs the model
            once for each sample: exact for every model, second derivatives included, and slower
            (:mod:`flash_clipping.one_by_one`).
        clipping: ``"flat"``, ``"per_layer"`` or ``"automatic"``
            (:func:`~flash_clipping.finish.clipping.clipping_coefficients`).
        folded_modules: names of modules, as shell patterns (``"layers.*.attention*"``), that with
            all below them see several rows per sample along the batch axis: windows folded into the
            batch, say. All rows of one sample must lie together, and every sample have as many.
        unit: what a sample is, where that is no row (:class:`~flash_clipping.Documents`). "Sample"
            means such a *unit* then, and ``B`` their number. With ``loss_reduction="mean"`` the
            mean is over rows.

    Guarantees:
        For any batch and any sample removed from it, ``sum_b coef_b g_b`` changes by at most
        1.01 ``max_grad_norm``, in batches of up to 16,384 samples; noise is drawn for that.
        A sample whose gradient is not finite adds nothing. Results are bitwise equal from
        run to run. No step waits for the device.

    Raises:
        NotImplementedError: the model holds a layer that mixes samples (BatchNorm); or, in forward
            and if ``strict``, a buffer is changed.
        FlashClippingError: in forward or backward, where a norm would be wrong.
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: Reduction = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        use_ghost_clipping: bool = True,
        max_grad_norm: float | Sequence[float] = 1.0,
        kernels: Kernels | None = None,
        mode: Mode = "one_pass",
        clipping: str = "flat",
        folded_modules: Sequence[str] = (),
        unit: Documents | None = None,
    ):
        check_options(locals(), wrapper=True)
        (refuse_one_by_one if mode == "one_by_one" else refuse_unsupported)(m)
        check_bounds(clipping, max_grad_norm, sum(p.requires_grad for p in m.parameters()))
        is_tapped = mode != "one_by_one"
        self._rounds_by_scale = wings.rounds_by_scale(m) if is_tapped else ""
        self.strict, self.mode, self.clipping, self.unit = strict, mode, clipping, unit
        kernels = kernels or Kernels()
        self.kernels = replace(kernels, cuda_graphs=kernels.cuda_graphs or "off")
        self.folded_modules = tuple(folded_modules)
        #: Sums and norms without noise.
        self.running_step = GradLedger(m)
        #: Finds what is told of the rows of calls; ``None`` while nobody tells anything.
        self._told: ToldRows | None = None
        #: ``cuda_graphs="auto"``: what replays calls of the model.
        self._graphs: Any = None
        self._loss_look = LossLook(m)
        self._trainable = ModelParameters(m)
        options = ClipOptions(
            clip=self._clip,
            note_sums=self.running_step.note_sums,
            trainable=self._trainable,
            state=self._state,
            loss_reduction=loss_reduction,
            batch_first=batch_first,
            backend=self.kernels.backend,
        )
        self._session = ClippingSession(options, None if unit is None else unit.argument)
        #: What a model has besides that ``fully_shard`` was applied to.
        self._sharded = sharded_model(m, self._session, mode)
        self._session.options.is_sharded = self._sharded is not None
        self._session.proof.has_oracle = self._sharded is None
        if mode == "two_pass" and self._sharded is None:
            self._session.calls.backward_pass_class = TwoWalks
        #: Of backward passes that take layers the short way: nobody watches them.
        self._usual_pass = None if mode == "two_pass" else self._session.calls.backward_pass_class
        GradSampleHooksFastGradientClipping.__init__(
            self,
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
            use_ghost_clipping=use_ghost_clipping,
            max_grad_norm=max_grad_norm,
        )
        if self.kernels.cuda_graphs == "auto":
            wings.replay_calls(self)

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
        """No errors: Opacus' are of buffers, and whether one changes shows in forward."""
        return []

    # -- installation ---------------------------------------------------------------------------

    def add_hooks(
        self,
        *,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        force_functorch: bool = False,
    ) -> None:
        """Tap every layer that owns parameters, and watch the root module's inputs and outputs."""
        root: Any = self._module
        if hasattr(root, "autograd_grad_sample_hooks"):
            raise InvalidValue(
                "FC172 Trying to add hooks twice to the same model. One model has one optimizer, "
                "with several parameter groups. To start afresh, take the hooks off first: "
                "to_standard_module(), or cleanup() with wrap_model=False."
            )
        # Opacus' users and tests find the handles under this name.
        handles: list[Any] = []
        root.autograd_grad_sample_hooks = self.autograd_grad_sample_hooks = handles  # type: ignore[assignment]
        vars(root)["__deepcopy__"] = partial(_plain_copy, self)
        wrapper = self if isinstance(self, nn.Module) else root
        if self.mode == "one_by_one":
            self._installed: list[Any] = [wings.one_by_one(self, wrapper, handles)]
            self.enable_hooks()
            return
        refuse_unsupported(root)
        if self._sharded is not None:
            self._sharded.add_first_hooks(handles, wings.lay_out_by_hooks)
        self._taps = InstalledTaps(
            root,
            self._session,
            mode=self.mode,
            by_function=force_functorch,
            folded_modules=self.folded_modules,
        )
        self._trainable.watch(wrapper, self._session, handles)
        self._watch = ModelWatch(self._trainable, self._taps, self.strict)
        if self.unit is not None:
            take_map = self.follow_rows().take_map
            handles.append(root.register_forward_pre_hook(take_map, with_kwargs=True))
        handles.append(root.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        own_losses = wings.own_losses(root, self._session, handles)  # first: it knows the losses
        handles.append(root.register_forward_hook(self._after_forward, with_kwargs=True))
        handles.append(root.register_forward_hook(self._session.leave_forward, always_call=True))
        self._installed = [self._taps, own_losses, self._trainable]
        if self._sharded is not None:
            self._watch.sharded = self._sharded
            self._sharded.add_last_hooks(handles, self._taps.all)
        self.enable_hooks()

    def remove_hooks(self) -> None:
        """Take off all taps and hooks; the model is as it was."""
        self._module.__dict__.pop("__deepcopy__", None)
        for part in self._installed:
            part.remove()
        if self._graphs is not None:
            if self._module._compiled_call_impl is self._graphs:  # none of a later compile()
                self._module._compiled_call_impl = None
            self._graphs = None
        self.running_step.forget()
        self.running_step.follower = None
        super().remove_hooks()

    def enable_hooks(self) -> None:
        """Record backward passes: they leave norms, coefficients and clipped sums."""
        super().enable_hooks()
        self._session.mode.enabled = True

    def disable_hooks(self) -> None:
        """Leave backward passes alone: they give ordinary gradients."""
        super().disable_hooks()
        self._session.mode.enabled, self._session.calls.proven_call = False, None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model's forward and backward, with arguments as of ``torch.compile``.

        ``fullgraph=True`` works wherever it does for the plain model
        (:mod:`flash_clipping.capture.compiled` tells for what layers). Norms and clipped sums are
        those of the model that is not compiled.
        """
        refuse_replay(self.mode, "model.compile()")
        self._taps.regions.compile(self._taps.of_root, compiler_of(args, kwargs))

    # -- forward: who is a sample? --------------------------------------------------------------

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        session = self._session
        if not session.mode.enabled:
            return args, kwargs
        if device_checks.sent:
            device_checks.raise_found()
        session.enter_forward()
        if self._watch.before_forward(module) and (follower := self.running_step.follower):
            follower.compile_ahead()  # now that loaders have started their workers
        tensors = batched_inputs(args, kwargs)
        for x in tensors:
            if x.layout is not torch.strided or x.is_nested:
                refuse_layout(module, x)
        if tensors and not tensors[0].numel() and torch.is_grad_enabled():
            refuse_no_rows(module, session, tensors)
        told = self._told.of_call(module, tensors, args, kwargs) if self._told else _NOTHING
        if not told.is_known:
            self._watch.look_at(module, tensors, args, kwargs)
        session.calls.returning = forward = session.begin_forward(tensors, units=told.units)
        forward.counted_rows = EVERY_ROW
        if self._told is not None:
            self._told.note(told, forward)
        if forward.recorded:
            self.running_step.await_backward(tensors)
            # Watched backward passes (diagnostics, pipelines) see all layers alike.
            if told.units is None and session.calls.backward_pass_class is self._usual_pass:
                session.calls.proven_call = forward
        return args, kwargs

    def look_at_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See which rows are samples in a call that is replayed, as its forward would."""
        self._session.enter_forward()
        self._watch.before_forward(self._module)
        self._watch.look_at(self._module, batched_inputs(args, kwargs), args, kwargs)

    def _after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        session = self._session
        call, session.calls.returning = session.calls.returning, None
        if call is None:
            return
        self._watch.after_forward(module, args, kwargs, output)
        if not torch.is_grad_enabled():
            return
        call.ended = True
        if call.guesses or self._sharded is not None:
            subject = self._watch.subject(module, args, kwargs)
            self._watch.prove_if(bool(call.guesses), subject, call)
        if not (is_dynamo_compiling() or self._loss_look.ended):
            self._loss_look.follow(tensors_in(output), call)

        def start_backward(grad: Tensor, call: ForwardCall = call) -> None:
            if session.mode.enabled:
                session.begin_backward(call)

        leaves = (output,) if isinstance(output, Tensor) else tensors_in(output)
        if len(leaves) + len(call.input_storages) > 2:  # plain calls cost no more
            self.running_step.note_results(call, leaves)
        for leaf in leaves:
            if leaf.requires_grad:
                leaf.register_hook(start_backward)

    def expect_samples(self, n: int | None) -> None:
        """Tell how many samples (units, with ``unit``) the loader drew for the next forward,
        and for all others that record gradients, until another number is given; ``None`` if it is
        not known.

        Raises:
            FlashClippingError: in forward, where the model is called with a batch of another size.
        """
        self._session.rows.drawn = n
        self.follow_rows()

    def follow_rows(self) -> ToldRows:
        """A loader, or the user, tells of the rows of calls from now on."""
        if self._told is None:
            watch = None if self.mode == "one_by_one" else self._watch
            self._told = ToldRows(self._session, watch, self._sharded)
        return self._told

    def expect_rows(self, order: Tensor | None) -> None:
        """Tell which row of the loader's batch, the last one, each row of the model's input is.

        Needed where it matters (``units``, ``max_batch_size``, batches in an order), and the model
        is called with other tensors than the batch's: rows changed, or in another order.

        Args:
            order: ``[rows]``, integers; ``None``: the batch's own tensors again.

        Raises:
            FlashClippingError: there is no batch, or it has no such rows.
        """
        self._session.rows.draws.expect_rows(order)

    def check_losses(self, losses: Tensor) -> None:
        """Refuse per-sample losses that are not as many as the samples of the last forward.

        Raises:
            FlashClippingError: what was taken for samples is something else.
        """
        check_losses(self._session, losses)

    # -- backward: norms to coefficients --------------------------------------------------------

    def _clip(self, params: list[nn.Parameter], norms_PB: Tensor, doubts: Doubts) -> Tensor:
        """Publish the norms of one backward; return its coefficients, which are by upper bounds of
        what is released (:mod:`flash_clipping.ops.error_bounds`)."""
        session, step = self._session, self.running_step
        if self._rounds_by_scale and session.options.loss_reduction == "mean":
            wings.refuse_mean(self._rounds_by_scale)
        step.awaits_backward = False
        counted, draw = session.rows_and_draw()
        rows = norms_PB.shape[1]
        if counted is NO_ROW:
            norms_PB, doubts = norms_PB[:, :0], Doubts((), doubts.scale)
        is_padded = counted.rows is not None
        if is_padded:
            norms_PB = counted.replaced(norms_PB, 0.0)
        if session.calls.captured is None:
            step.begin_backward(params, self.clipping, self.grad_accumulation_allowed)
        total_B = total_norm(norms_PB)
        if self.clipping == "per_layer":
            upper = doubts.bound_each([id(param) for param in params], norms_PB)
        else:
            upper = doubts.bound_total(total_B) if doubts.blocks else total_B
        if is_padded:
            upper = counted.replaced(upper, torch.inf)
        step.norms = Norms(params, norms_PB, total_B, upper)
        coef = self._coefficients(upper)
        if self._sharded is not None and (holds := device_checks.gate()) is not None:
            # Here, as other processes add this one's samples to theirs.
            coef = torch.where(holds.to(coef.device, non_blocking=True), coef, 0)
        # A coefficient of 0 is of a sample that is not finite, or of padding.
        positive = counted.replaced(coef, 1.0) if is_padded else coef
        if session.calls.captured is None:
            step.count_backward(total_B, draw)
            session.calls.non_finite.note(positive)
        else:  # every replay publishes its own
            session.calls.captured.norms.append(step.norms)
            session.calls.captured.coefs.append(positive)
        return coef.new_zeros(*coef.shape[:-1], rows) if counted is NO_ROW else coef

    def _coefficients(self, upper: Tensor) -> Tensor:
        """``[B]`` from bounds of samples, ``[P, B]`` from bounds of their parameters' gradients."""
        bound = self.running_step.bound
        if self.clipping == "per_layer":
            return clipping_coefficients(upper, bound, self.clipping)
        return clipping_coefficients(upper.unsqueeze(0), bound, self.clipping, upper)

    @contextmanager
    def summed_loss(self) -> Iterator[bool]:
        """Take the gradients of a backward pass for samples' own, whatever ``loss_reduction`` says.
        Yields whether that is so: with hooks disabled gradients and loss are left alone."""
        session = self._session
        before = session.options.loss_reduction
        if session.mode.enabled:
            session.options.loss_reduction = "sum"
        try:
            yield session.mode.enabled
        finally:
            session.options.loss_reduction = before

    # -- what users ask for ---------------------------------------------------------------------

    def get_norm_sample(self) -> Tensor:
        """Norm of every sample's gradient over all trainable parameters: fp32 ``[B]``.

        fp64 for a model in float64.

        Raises:
            FlashClippingError: no backward pass has been recorded since the last forward, or its
                step has added noise.
        """
        return self.running_step.norms_of(self.trainable_parameters).total_B

    def get_clipping_coef(self) -> Tensor:
        """Clipping coefficient of every sample: fp32 ``[B]`` (``[P, B]`` when per layer).

        Follows ``max_grad_norm`` as it is now. Never NaN; 0 for a sample that is not finite. May
        be below ``max_grad_norm / norm`` for a sample whose positions nearly cancel
        (:mod:`flash_clipping.ops.error_bounds`).

        Raises:
            FlashClippingError: as :meth:`get_norm_sample`.
        """
        return self._coefficients(self.running_step.norms_of(self.trainable_parameters).upper)

    @property  # type: ignore[override]  # Opacus assigns None
    def _per_sample_gradient_norms(self) -> Tensor | None:
        found = self.running_step.norms
        return None if found is None else found.total_B

    @_per_sample_gradient_norms.setter
    def _per_sample_gradient_norms(self, value: Any) -> None:
        """Opacus assigns None once."""

    @property
    def max_grad_norm(self) -> Any:
        """Clipping bound; a list with one for each trainable parameter when per layer.

        The optimizer's is the same one. Set at any time, it applies from the next step on. A
        backward pass that would go on with a step by another bound is an error. Noise is for
        the bound that the step was clipped by.

        Raises:
            ValueError: when set to what is no positive number.
        """
        return self.running_step.bound

    @max_grad_norm.setter
    def max_grad_norm(self, value: Any) -> None:
        self.running_step.bound = checked_bound(value)

    @property
    def backward_count(self) -> int:
        """Backward passes whose clipped sums nobody has taken yet."""
        record = self.running_step.record
        return 0 if record is None else record.backwards

    @property
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that are trainable now, in the model's order."""
        if self._sharded is not None:  # layers record whole parameters, users see shards
            return self._sharded.slots.trainable()
        return [*self._session.options.trainable()]

    @trainable_parameters.setter
    def trainable_parameters(self, value: Any) -> None:
        """Opacus assigns the list once; ours follows ``requires_grad``."""

    def _state(self) -> Iterator[Tensor]:
        return chain(self._module.parameters(), self._module.buffers())

    def set_grad_sample_to_none(self) -> None:
        """Gradients are being cleared; there is never a ``p.grad_sample`` to clear."""
        self.running_step.forget()


class GradSampleModuleFlashClipping(
    ModuleProxy, GradSampleHooksFlashClipping, GradSampleModuleFastGradientClipping
):
    """Flash clipping around a model (Opacus' ``wrap_model=True``).

    See :class:`GradSampleHooksFlashClipping` for arguments, guarantees and errors. Attributes and
    methods that it has not itself are the model's (``config``, ``device``, ``generate``,
    ``save_pretrained``). State dicts have Opacus' ``_module.`` prefix; those of the plain model are
    loaded as well. ``to_standard_module()`` gives the model back as it was.
    """

    def __init__(self, m: nn.Module, **options: Unpack[WrapperOptions]):
        nn.Module.__init__(self)
        GradSampleHooksFlashClipping.__init__(self, m, **options)
        self.grad_accumulation_hook = None
        self._constructed = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        model = self._modules["_module"]  # past two ``__getattr__``
        assert model is not None
        try:
            return model(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            error.add_note(HALVE_PARTS)
            raise

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse ``torch.jit.script``, which asks for this."""
        refuse_export(self._module)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients of the model, as Opacus' wrapped modules do."""
        self._session.forget_calls(self.running_step.draw)
        self.set_grad_sample_to_none()
        self._module.zero_grad(set_to_none)
        self.running_step.note_cleared(self._module.parameters())
