"""The methods that are compared: how each is set up, and what one of its training steps is.

Every method gets a model of its own, built from the same seed, and is used the way its own
documentation says. A step is ``zero_grad``, forward, backward and clipping, and, where the setting
asks for it, noise and AdamW; by ``nonprivate-graph`` and ``flash-graph``, everything but these two
is one launch. Two peers cannot leave their noise out: FastDP and FlashDP draw it
inside the backward pass, so their steps without an optimizer contain it (multiplied by zero).

The peers are not dependencies. Install them, or put their sources on ``PYTHONPATH``:

* FastDP, ``import fastDP``: https://github.com/awslabs/fast-differential-privacy
* FlashDP, ``import flashdp``: https://github.com/liangyuwang/FlashDP4Review
* FlashNorm, ``import flashnorm``: https://github.com/JackyXiao98/opacus
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.models import add_lora
from benchmarks.workload import Workload, loss
from flash_clipping import GraphedStep, Kernels


@dataclass(frozen=True)
class Setting:
    """What all methods of one comparison have in common. With ``autocast`` weights are fp32, and
    forward runs under autocast to ``dtype``."""

    workload: Workload
    device: torch.device
    dtype: torch.dtype
    optimizer: bool = False
    compile: bool = False
    autocast: bool = False
    max_grad_norm: float = 1.0
    noise_multiplier: float = 1.0
    seed: int = 0

    def build(self) -> nn.Module:
        """The model on its device, with the same weights at every call."""
        torch.manual_seed(self.seed)
        with self.device:
            model = self.workload.build()
            if self.workload.lora:
                model = add_lora(model, self.workload.lora)
        return model.to(device=self.device, dtype=self.weights).train()

    @property
    def weights(self) -> torch.dtype:
        """The dtype of parameters."""
        return torch.float32 if self.autocast else self.dtype

    def mixed(self) -> torch.autocast:
        """What forward and the loss run under."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.autocast)

    def draw(self, number: int) -> list[tuple[Tensor, Tensor]]:
        """That many batches on the device, the same ones at every call."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        batches = []
        for _ in range(number):
            inputs, targets = self.workload.draw(generator)
            if inputs.is_floating_point():
                inputs = inputs.to(self.weights)
            batches.append((inputs.to(self.device), targets.to(self.device)))
        return batches


class Method(ABC):
    """One way to take a training step.

    ``package`` is what must be importable; ``flat`` says that the method clips by the norm over all
    parameters, so that its norms and clipped sums can be compared with another's; ``ours``, that
    its failure is ours; ``graph``, that its forward and backward are one CUDA graph.
    """

    package: str | None = None
    flat: bool = True
    ours: bool = False
    graph: bool = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        with _quiet():
            self._set_up(setting.build())
        if setting.compile:
            self.module.compile()
        self._graphed = GraphedStep(self._backward, self.module) if self.graph else None

    # Any, because the libraries hang what they have to say on modules, parameters and optimizers.
    module: Any
    optimizer: Any

    @abstractmethod
    def _set_up(self, model: nn.Module) -> None:
        """Set ``module``, which is called, and ``optimizer``, which may be left unused."""

    @classmethod
    def missing(cls, setting: Setting) -> str | None:
        """Why the method cannot be used here, or None."""
        if cls.package and importlib.util.find_spec(cls.package) is None:
            return f"the package {cls.package} cannot be imported"
        if cls.graph and setting.device.type != "cuda":
            return f"CUDA graphs need a CUDA device, found {setting.device}"
        return None

    @property
    def settling(self) -> int:
        """Steps before the first that is like all others as far as memory goes. The one in which a
        graph is captured is: it allocates what replays use."""
        return 1 if self._graphed is None else self._graphed.warmup

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.zero_grad()
        self.backward(inputs, targets)
        if self.setting.optimizer:
            self.update()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, inputs: Tensor, targets: Tensor) -> None:
        """Forward, backward and clipping."""
        (self._graphed or self._backward)(inputs, targets)

    def _backward(self, inputs: Tensor, targets: Tensor) -> None:
        with self.setting.mixed():
            value = loss(self.module(inputs), targets)
        value.backward()

    def update(self) -> None:
        """Noise and the optimizer's step."""
        self.optimizer.step()

    def norms(self) -> Tensor | None:
        """After ``backward``: ``[B]`` norms of the per-sample gradients, if the method tells."""
        return None

    def coefficients(self) -> Tensor | None:
        """After ``backward``: what each sample was multiplied by, if the method tells."""
        return None

    def gradients(self) -> Iterator[Tensor] | None:
        """After ``backward``: the clipped sums, one per trainable parameter in order, or None.

        Only for a setting without an optimizer: some peers add their noise to them otherwise.
        """
        return None

    def _new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.setting.optimizer:
            return torch.optim.AdamW(parameters, lr=1e-5)
        return torch.optim.SGD(parameters, lr=0.0)  # only for its zero_grad; holds no state

    def _trainable(self) -> list[Any]:
        return [p for p in self.module.parameters() if p.requires_grad]


class NonPrivate(Method):
    """The step that everything is compared with."""

    flat = False

    def _set_up(self, model: nn.Module) -> None:
        self.module = model
        self.optimizer = self._new_optimizer(model)


class _Opacus(Method):
    """What a user of ``PrivacyEngine.make_private`` gets."""

    package = "opacus"
    grad_sample_mode: str

    def _engine(self) -> Any:
        from opacus import PrivacyEngine

        return PrivacyEngine()

    def _make_private(self, model: nn.Module, **options: Any) -> tuple[Any, ...]:
        setting = self.setting
        # The engine wants a loader to know the sampling rate from; it is never iterated.
        samples = TensorDataset(torch.empty(setting.workload.batch, 1))
        return self._engine().make_private(
            module=model,
            optimizer=self._new_optimizer(model),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(samples, batch_size=setting.workload.batch),
            noise_multiplier=setting.noise_multiplier,
            max_grad_norm=setting.max_grad_norm,
            poisson_sampling=False,
            grad_sample_mode=self.grad_sample_mode,
            **options,
        )


class OpacusGhost(_Opacus):
    """Opacus' ghost clipping: two backward passes."""

    grad_sample_mode = "ghost"

    def _set_up(self, model: nn.Module) -> None:
        self.module, self.optimizer, self._criterion, _ = self._make_private(model)

    def _backward(self, inputs: Tensor, targets: Tensor) -> None:
        with self.setting.mixed():
            logits = self.module(inputs)
            shape = logits.shape if logits.dim() == 3 else None
            value = self._criterion(logits.flatten(0, -2), targets.flatten(), shape=shape)
        value.backward()

    def norms(self) -> Tensor:
        return self.module.get_norm_sample()

    def gradients(self) -> Iterator[Tensor]:
        return (p.grad for p in self._trainable())


class OpacusRandomized(OpacusGhost):
    """Opacus' ghost clipping by estimates of the norms of linear layers: the mean of ``‖gᵀ v‖²``
    over :data:`VECTORS` Gaussian ``v``, so that no matrix over pairs of positions is needed.

    Ullah et al., "Efficient DP-SGD for LLMs with Randomized Clipping", 2026, by Hutchinson's
    estimator. They have published no code; this is how it reads on Opacus.
    """

    def _set_up(self, model: nn.Module) -> None:
        super()._set_up(model)
        hooks = self.module
        hooks.NORM_SAMPLERS = {**hooks.NORM_SAMPLERS, nn.Linear: _estimated_norms}


VECTORS = 16


def _estimated_norms(
    layer: nn.Linear, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """In place of Opacus' norm sampler of linear layers: of ``[B, T, d]`` and ``[B, T, p]``."""
    if backprops.dim() == 2:
        from opacus.grad_sample.linear import compute_linear_norm_sample

        return compute_linear_norm_sample(layer, activations, backprops)
    G_BTp, A_BTd = backprops, activations[0].to(backprops.dtype)
    found = {}
    if layer.weight.requires_grad:
        v_pk = torch.randn(G_BTp.shape[-1], VECTORS, dtype=G_BTp.dtype, device=G_BTp.device)
        squares = (A_BTd.mT @ (G_BTp @ v_pk)).float().square()  # [B, d, k]
        found[layer.weight] = (squares.sum((1, 2)) / VECTORS).sqrt()
    if layer.bias is not None and layer.bias.requires_grad:
        found[layer.bias] = G_BTp.sum(1, dtype=torch.float32).norm(dim=1)
    return found


class OpacusHooks(_Opacus):
    """Opacus' hooks: every per-sample gradient is stored."""

    grad_sample_mode = "hooks"

    def _set_up(self, model: nn.Module) -> None:
        self.module, self.optimizer, _ = self._make_private(model)

    def _backward(self, inputs: Tensor, targets: Tensor) -> None:
        super()._backward(inputs, targets)
        if not self.setting.optimizer:  # else its step() clips
            self.optimizer.clip_and_accumulate()

    def norms(self) -> Tensor:
        found = [p.grad_sample.flatten(1).float().norm(dim=1) for p in self._trainable()]
        return torch.stack(found).norm(dim=0)

    def gradients(self) -> Iterator[Tensor]:
        return (p.summed_grad for p in self._trainable())


class Flash(_Opacus):
    """Flash clipping, one backward pass."""

    package = "flash_clipping"
    ours = True
    grad_sample_mode = "flash"
    mode = "one_pass"
    cuda_graphs = "off"

    def _engine(self) -> Any:
        from flash_clipping import FlashPrivacyEngine

        return FlashPrivacyEngine()

    def _set_up(self, model: nn.Module) -> None:
        self.module, self.optimizer, *_ = self._make_private(
            model,
            mode=self.mode,
            kernels=Kernels(cuda_graphs=self.cuda_graphs),
        )

    def norms(self) -> Tensor:
        return self.module.get_norm_sample()

    def coefficients(self) -> Tensor:
        return self.module.get_clipping_coef()

    def gradients(self) -> Iterator[Tensor]:
        return (p.grad for p in self._trainable())


class FastDP(Method):
    """FastDP's MixOpt book-keeping, all-layer clipping, with its origin-parameter trick."""

    package = "fastDP"

    def _set_up(self, model: nn.Module) -> None:
        from fastDP import PrivacyEngine

        setting = self.setting
        self._parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = self._new_optimizer(model)
        engine = PrivacyEngine(
            model,
            batch_size=setting.workload.batch,
            sample_size=setting.workload.batch,
            epochs=1,
            noise_multiplier=setting.noise_multiplier if setting.optimizer else 0.0,
            max_grad_norm=setting.max_grad_norm,
            clipping_mode="MixOpt",
            clipping_fn="Abadi",
            clipping_style="all-layer",
            loss_reduction="mean",
            origin_params=_origin_parameters(model, setting.draw(1)[0][0][:1]),
        )
        if setting.optimizer:
            engine.attach(self.optimizer)
        self.module = model

    def zero_grad(self) -> None:
        super().zero_grad()
        for p in self._parameters:
            if hasattr(p, "private_grad"):  # its own step() takes them away
                del p.private_grad

    def gradients(self) -> Iterator[Tensor]:
        return (p.private_grad for p in self._parameters)


class FlashDP(Method):
    """FlashDP: the norm fused into the weight-gradient matmul, each layer clipped separately.

    Embeddings are not among its layers and stay unclipped.
    """

    package = "flashdp"
    flat = False

    def _set_up(self, model: nn.Module) -> None:
        from flashdp import wrap_with_flashdp_layers

        self.module = wrap_with_flashdp_layers(
            model,
            target_modules=[nn.Linear, nn.LayerNorm],
            C=self.setting.max_grad_norm,
            noise_multiplier=self.setting.noise_multiplier if self.setting.optimizer else 0.0,
            feedback=False,
        ).to(device=self.setting.device, dtype=self.setting.dtype)  # its layers start in float32
        self.optimizer = self._new_optimizer(self.module)


class FlashNorm(OpacusGhost):
    """FlashNorm's fork of Opacus, one backward pass: norms are fused into the weight gradients of
    linear layers, which it puts in the place of PyTorch's."""

    package = "flashnorm"
    grad_sample_mode = "flash_fuse_bk"

    def _engine(self) -> Any:
        from flashnorm.privacy_engine import FlashNormPrivacyEngine

        return FlashNormPrivacyEngine()

    def _set_up(self, model: nn.Module) -> None:
        from flashnorm.grad_sample.fused_flash_linear import replace_linear_with_fused

        super()._set_up(replace_linear_with_fused(model))


def _but(method: type[Method], **attributes: Any) -> type[Method]:
    """The same with other attributes."""
    return type(method.__name__, (method,), attributes)


METHODS: dict[str, type[Method]] = {
    "nonprivate": NonPrivate,
    "nonprivate-graph": _but(NonPrivate, graph=True),
    "flash": Flash,
    "flash-graph": _but(Flash, graph=True),
    # Replayed unasked; the capture comes after three steps, and what it allocates stays.
    "flash-auto-graphs": _but(Flash, cuda_graphs="auto", settling=3),
    "flash-two-pass": _but(Flash, mode="two_pass"),
    "flash-two-pass-graph": _but(Flash, mode="two_pass", graph=True),
    "opacus-ghost": OpacusGhost,
    "opacus-randomized": OpacusRandomized,
    "opacus-hooks": OpacusHooks,
    "fastdp": FastDP,
    "flashdp": FlashDP,
    "flashnorm-fused": FlashNorm,
}


def _origin_parameters(model: nn.Module, inputs: Tensor) -> list[str]:
    """Parameters of the layers that nothing trainable precedes.

    FastDP's documentation asks for the first layer's; autograd then leaves every other weight
    gradient out. Here: of every layer whose input does not require grad. A bias will do where
    there is one.
    """
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
            own = {n: p for n, p in layer.named_parameters(recurse=False) if p.requires_grad}
            if own and not any(torch.is_tensor(a) and a.requires_grad for a in arguments):
                found.append(f"{name}.{'bias' if 'bias' in own else next(iter(own))}")

        return hook

    handles = [layer.register_forward_pre_hook(look(name)) for name, layer in model.named_modules()]
    model(inputs)
    for handle in handles:
        handle.remove()
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The peers print while they are set up, and Opacus warns about its random generator."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
