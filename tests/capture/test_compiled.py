"""Compiled models: norms, coefficients and clipped sums are those of one sample at a time."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashClippingError, FlashPrivacyEngine, GradSampleModuleFlashClipping
from flash_clipping.capture.compiled.region import Region
from flash_clipping.capture.compiled.shapes import Affine
from flash_clipping.capture.compiled.wiring import Seen
from flash_clipping.integration.grad_sample_module import GradSampleHooksFlashClipping
from tests.support.cases import bound_between, check_case, make_case, step_case
from tests.support.models import CASES, Case, floats, ids, squared_loss
from tests.support.oracle import Truth, assert_close, per_sample_truth

needs_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None and shutil.which("clang") is None, reason="needs a C++ compiler"
)

#: Cases of which every trainable layer is wired; those that take long by themselves.
WIRED = [
    "linear_2d",
    "linear_3d",
    "transposed_linear",
    "embedding_padding",
    "layer_norm_2d",
    "rms_norm",
    "group_norm",
    "conv1d",
    "conv2d_same",
    "instance_norm1d",
]
ALSO_WIRED = [
    "linear_5d",
    "embedding",
    "embedding_flat",
    "layer_norm",
    "layer_norm_plain",
    "group_norm_2d",
    "conv2d_groups",
    "conv2d_reflect",
    "conv3d",
    "instance_norm3d",
    "attention",
]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


class Backend:
    """AOTAutograd without Inductor, which counts the graphs that it gets."""

    def __init__(self, name: str = "aot_eager"):
        self.run = torch._dynamo.lookup_backend(name)
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self.run(graph, inputs)


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, width: int, checkpointing: bool = False):
        super().__init__()
        self.checkpointing = checkpointing
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x)), inplace=True))


class Attending(Block):
    def __init__(self, width: int, checkpointing: bool = False):
        super().__init__(width, checkpointing)
        self.before = nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def body(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).chunk(3, dim=-1)
        return super().body(x + self.out(torch.softmax(q @ k.mT, dim=-1) @ v))


class Language(nn.Module):
    """Tokens in, logits out; blocks between."""

    def __init__(self, checkpointing: bool = False, blocks: int = 1):
        super().__init__()
        self.tokens = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(Block(8, checkpointing) for _ in range(blocks))
        self.head = nn.Linear(8, 13)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Transformer(Language):
    """A head tied to the embedding; positions are an embedding that is expanded over the batch."""

    def __init__(self, checkpointing: bool = False):
        super().__init__(blocks=0)
        self.positions, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.blocks.append(Attending(8, checkpointing))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def lm_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    (ids,) = batch
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").sum(1)


LM = Case(Language, ids(5, 6, vocab=13), lm_loss)


def wrap(model: nn.Module, **options: Any) -> GradSampleModuleFlashClipping:
    return GradSampleModuleFlashClipping(model, **options)


def compare(
    module: GradSampleModuleFlashClipping,
    truth: Truth,
    case: Case,
    batch: tuple[Tensor, ...],
    bound: float,
    tolerance: float = 1e-5,
    steps: int = 2,
) -> None:
    """The first step is rehearsed and compiled; the next finds all that."""
    for _ in range(steps):
        module.zero_grad(set_to_none=True)
        step_case(module, case, batch, "mean")
        check_case(module, truth, bound, tolerance)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", [*WIRED, *map(slow, ALSO_WIRED)])
def test_wired_rules_match_the_oracle(name: str) -> None:
    case, backend = CASES[name], Backend()
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(backend=backend, fullgraph=True)
    compare(module, truth, case, batch, bound)
    assert backend.graphs == 1


@pytest.mark.parametrize(
    ("backend", "checkpointing", "reduction"),
    [slow("eager", False, "mean"), ("aot_eager", False, "sum"), ("aot_eager", True, "mean")],
)
def test_a_tied_transformer(backend: str, checkpointing: bool, reduction: str) -> None:
    case = Case(lambda: Transformer(checkpointing), LM.batch, lm_loss)
    model, batch = make_case(Case(Transformer, LM.batch, lm_loss), torch.float32)
    truth = per_sample_truth(model, batch, lm_loss)
    bound = bound_between(truth)
    module = wrap(make_case(case, torch.float32)[0], max_grad_norm=bound, loss_reduction=reduction)
    module.compile(backend=backend, fullgraph=True)
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        step_case(module, case, batch, reduction)
        check_case(module, truth, bound, 1e-5)


@needs_compiler
@pytest.mark.parametrize("kind", [Language, slow(Transformer)], ids=["small", "large"])
def test_inductor(kind: type[Language]) -> None:
    model, batch = make_case(Case(kind, LM.batch, lm_loss), torch.float32)
    truth = per_sample_truth(model, batch, lm_loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(fullgraph=True)
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        step_case(module, LM, batch, "mean")
        check_case(module, truth, bound, 1e-5)


def test_batches_of_many_sizes_share_graphs() -> None:
    backend = Backend()
    model, _ = make_case(LM, torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend=backend, fullgraph=True)
    learned: list[int] = []
    for size in (4, 7, 5, 9, 3):
        batch = (torch.randint(0, 13, (size, 6)),)
        truth = per_sample_truth(plain, batch, lm_loss)
        module.zero_grad(set_to_none=True)
        step_case(module, LM, batch, "mean")
        check_case(module, truth, 0.5, 1e-5)
        learned.append(len(region_of(module)._known))
    assert backend.graphs <= 3
    assert learned == [1, 2, 3, 4, 5]


def region_of(module: GradSampleModuleFlashClipping) -> Region:
    region = module._taps.of_root.instance_forward
    assert isinstance(region, Region)
    return region


def test_shapes_are_learned_once_for_two_batch_sizes_and_two_lengths() -> None:
    runs = 0

    class Counted(Language):
        def forward(self, ids: Tensor) -> Tensor:
            nonlocal runs
            if not torch.compiler.is_dynamo_compiling():
                runs += 1
            return super().forward(ids)

    torch.manual_seed(0)
    module = wrap(Counted(), max_grad_norm=0.5)
    module.compile(backend="eager", fullgraph=True)
    lm_loss(module, (torch.randint(0, 13, (4, 6)),)).mean().backward()
    rehearsed = runs
    for shape in [(7, 6), (5, 9), (9, 6), (3, 5)]:
        module.zero_grad(set_to_none=True)
        lm_loss(module, (torch.randint(0, 13, shape),)).mean().backward()
        assert module.get_norm_sample().shape == shape[:1]
    assert runs - rehearsed == 2


def test_autocast() -> None:
    model, batch = make_case(LM, torch.float32)
    eager = wrap(copy.deepcopy(model), max_grad_norm=0.5)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    for which in (eager, module, eager, module):
        which.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = lm_loss(which, batch)
        losses.mean().backward()
    assert_close(module.get_norm_sample(), eager.get_norm_sample(), 2e-2, "norms")
    for p, q in zip(model.parameters(), eager._module.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert_close(p.grad, q.grad, 5e-2)
    # The operands that are multiplied are also those that are measured.
    assert torch.bfloat16 in {wire.dtype for wire in last_layout(module).wires}


def last_layout(module: GradSampleModuleFlashClipping) -> Any:
    return next(reversed(region_of(module)._layouts.values()))


def test_a_model_in_bfloat16() -> None:
    model, batch = make_case(LM, torch.bfloat16)
    eager = wrap(copy.deepcopy(model), max_grad_norm=0.5)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    for which in (eager, module):
        lm_loss(which, batch).mean().backward()
    assert_close(module.get_norm_sample(), eager.get_norm_sample(), 2e-2, "norms")
    for p, q in zip(model.parameters(), eager._module.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert p.grad.dtype == torch.float32
        assert_close(p.grad, q.grad, 5e-2)


@pytest.mark.parametrize("frozen", [slow("tokens"), "blocks.0", slow("bias"), "weight"])
def test_frozen_parameters(frozen: str) -> None:
    case = LM
    model, batch = make_case(case, torch.float32)
    for name, param in model.named_parameters():
        param.requires_grad_(not (name.startswith(frozen) or name.endswith(frozen)))
    truth = per_sample_truth(model, batch, lm_loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(backend="aot_eager", fullgraph=True)
    compare(module, truth, case, batch, bound)


def test_unfrozen_between_steps() -> None:
    case = LM
    model, batch = make_case(case, torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    for frozen in ("blocks.0", "bias", "nothing"):
        for which in (plain, model):
            for name, param in which.named_parameters():
                param.requires_grad_(frozen not in name)
        compare(module, per_sample_truth(plain, batch, lm_loss), case, batch, 0.5, steps=1)


class Adapter(nn.Module):
    """LoRA as it mostly is: two small layers beside one that is frozen."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 0.5


def with_adapters() -> nn.Module:
    model = Language().requires_grad_(False)
    for block in model.blocks:
        for name in ("up", "down"):
            setattr(block, name, Adapter(getattr(block, name)))
    return model


def test_adapters() -> None:
    case, backend = Case(with_adapters, LM.batch, lm_loss), Backend()
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, lm_loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(backend=backend, fullgraph=True)
    compare(module, truth, case, batch, bound)
    assert backend.graphs == 1
    assert len(last_layout(module).slots) == 4  # two for each adapter


# -- compiled before it is wrapped -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_compiled_in_whole_before_wrapping(how: str) -> None:
    model, batch = make_case(LM, torch.float32)
    truth = per_sample_truth(model, batch, lm_loss)
    bound, backend = bound_between(truth), Backend()
    if how == "torch.compile":
        compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
        names = {f"_orig_mod.{name}" for name in truth.grads}
        truth.grads = {f"_orig_mod.{name}": g for name, g in truth.grads.items()}
        truth.param_norms = {f"_orig_mod.{name}": n for name, n in truth.param_norms.items()}
        assert names == {name for name, _ in compiled.named_parameters()}
    else:
        model.compile(backend=backend, fullgraph=True)
        compiled = model
    before = vars(compiled).get("_compiled_call_impl"), vars(compiled).get("forward")
    module = wrap(compiled, max_grad_norm=bound)
    compare(module, truth, LM, batch, bound)
    assert backend.graphs == 1
    module.to_standard_module()
    assert (vars(compiled).get("_compiled_call_impl"), vars(compiled).get("forward")) == before
    assert backend.graphs == 1


@pytest.mark.parametrize(
    ("checkpointing", "wrapped_first"), [(False, False), slow(False, True), (True, True)]
)
def test_blocks(checkpointing: bool, wrapped_first: bool) -> None:
    """Blocks of one type share what was compiled."""
    backend = Backend()
    case = Case(lambda: Language(checkpointing, blocks=3), LM.batch, lm_loss)
    plain = Case(lambda: Language(blocks=3), LM.batch, lm_loss)
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(make_case(plain, torch.float32)[0], batch, lm_loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound) if wrapped_first else None
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    module = module or wrap(model, max_grad_norm=bound)
    compare(module, truth, case, batch, bound)
    assert backend.graphs == 1
    module.to_standard_module()
    assert not any(isinstance(b._compiled_call_impl, Region) for b in model.blocks)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_compiled_blocks(reentrant: bool) -> None:
    class Checkpointed(Language):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    case = Case(lambda: Checkpointed(blocks=2), LM.batch, lm_loss)
    plain = Case(lambda: Language(blocks=2), LM.batch, lm_loss)
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(make_case(plain, torch.float32)[0], batch, lm_loss)
    bound = bound_between(truth)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    module = wrap(model, max_grad_norm=bound)
    compare(module, truth, case, batch, bound)


def test_compiled_blocks_in_a_compiled_model() -> None:
    backend = Backend()
    case = Case(lambda: Language(blocks=2), LM.batch, lm_loss)
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, lm_loss)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend=backend, fullgraph=True)
    compare(module, truth, case, batch, 0.5)
    assert backend.graphs == 1


def test_a_block_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(4, 8), Block(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(self.first(x)))

    case, backend = Case(Twice, floats(5, 3, 4)), Backend()
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    model.block.compile(backend=backend, fullgraph=True)
    compare(wrap(model, max_grad_norm=bound), truth, case, batch, bound)
    assert backend.graphs == 1


# -- other uses of layers --------------------------------------------------------------------------


class Shared(nn.Module):
    """One layer called twice, on inputs of two shapes, and three readers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.readers = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.shared(x)))
        y = self.norm(self.shared(input=x[:, :2]))
        x = torch.cat([x, y], dim=1)
        return sum(torch.sin(reader(x) * (i + 1)) for i, reader in enumerate(self.readers))


@pytest.mark.parametrize("clipping", ["flat", "per_layer", slow("automatic")])
def test_layers_that_are_called_twice(clipping: str) -> None:
    case = Case(Shared, floats(5, 7, 6))
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound: Any = 0.3 if clipping != "per_layer" else [0.1] * 10
    eager = wrap(copy.deepcopy(model), max_grad_norm=bound, clipping=clipping)
    module = wrap(model, max_grad_norm=bound, clipping=clipping)
    module.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for which in (eager, module):
            which.zero_grad(set_to_none=True)
            step_case(which, case, batch, "mean")
        assert_close(module.get_norm_sample(), truth.norms, 1e-5)
        assert_close(module.get_clipping_coef(), eager.get_clipping_coef(), 1e-5)
        for p, q in zip(model.parameters(), eager._module.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert_close(p.grad, q.grad, 1e-5)


def test_samples_along_the_second_axis() -> None:
    case = Case(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)),
        floats(7, 5, 4),
        lambda model, batch: model(*batch).square().sum((0, 2)),
    )
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(
        model, (batch[0].transpose(0, 1),), lambda m, b: m(b[0]).square().sum((1, 2))
    )
    module = wrap(model, max_grad_norm=1.0, batch_first=False)
    module.compile(backend="aot_eager", fullgraph=True)
    compare(module, truth, case, batch, 1.0)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        return self.left(x), self.right(x)


def test_an_output_that_is_not_used() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(*batch)[0].square().flatten(1).sum(1)

    case = Case(TwoOutputs, floats(5, 7, 4), loss)
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, loss)
    module = wrap(model, max_grad_norm=1.0)
    module.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        step_case(module, case, batch, "mean")
        assert_close(module.get_norm_sample(), truth.norms, 1e-5)
        assert_close(model.first.weight.grad, truth.clipped(1.0)["first.weight"], 1e-5)
        assert model.right.weight.grad is not None and not model.right.weight.grad.any()


@pytest.mark.parametrize("what", ["input", "one parameter"])
def test_gradients_of_something_alone(what: str) -> None:
    case = CASES["linear_3d"]
    model, (x,) = make_case(case, torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=1.0)
    module.compile(backend="aot_eager", fullgraph=True)
    x = x.requires_grad_()
    step_case(module, case, (x,), "mean")
    module.zero_grad(set_to_none=True)
    x.grad = None
    if what == "input":
        (found,) = torch.autograd.grad(case.loss(module, (x,)).mean(), x)
        (expected,) = torch.autograd.grad(case.loss(plain, (x,)).mean(), x)
        assert_close(found, expected, 1e-5)
        assert all(param.grad is None for param in model.parameters())
        return
    one = model.layers[0].bias
    case.loss(module, (x,)).mean().backward(inputs=[one])
    assert one.grad is not None
    assert [param.grad is not None for param in model.parameters()].count(True) == 1


def test_hooks_that_are_disabled_give_ordinary_gradients() -> None:
    model, batch = make_case(LM, torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=1e-3)
    module.compile(backend="aot_eager", fullgraph=True)
    lm_loss(module, batch).mean().backward()  # clipped
    lm_loss(plain, batch).mean().backward()
    clipped = [p.grad for p in model.parameters()]
    for late in (False, True):
        module.zero_grad(set_to_none=True)
        if late:  # after the forward
            module.enable_hooks()
            loss = lm_loss(module, batch).mean()
            module.disable_hooks()
        else:
            module.disable_hooks()
            loss = lm_loss(module, batch).mean()
        loss.backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert_close(p.grad, q.grad, 1e-5)
    module.enable_hooks()
    module.zero_grad(set_to_none=True)
    lm_loss(module, batch).mean().backward()
    for p, expected in zip(model.parameters(), clipped, strict=True):
        assert p.grad is not None and expected is not None
        assert_close(p.grad, expected, 1e-6)


def test_without_gradients_and_in_eval_mode() -> None:
    model, batch = make_case(LM, torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=1.0)
    module.compile(backend="aot_eager", fullgraph=True)
    expected = plain(*batch)
    with torch.no_grad():
        assert_close(module(*batch), expected, 1e-5)
        module.eval()
        assert_close(module(*batch), expected, 1e-5)
    assert_close(module(*batch), expected, 1e-5)
    module.train()
    truth = per_sample_truth(plain, batch, lm_loss)
    compare(module, truth, LM, batch, 1.0)


def test_two_backwards_before_a_step() -> None:
    case = CASES["linear_3d"]
    model, (x,) = make_case(case, torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=0.5)
    module.allow_grad_accumulation()
    module.compile(backend="aot_eager", fullgraph=True)
    parts = [(x[:2],), (x[2:],)]
    expected: dict[str, Tensor] = {}
    for part in parts:
        case.loss(module, part).sum().div(len(part[0])).backward()
        for name, clipped in per_sample_truth(plain, part, case.loss).clipped(0.5).items():
            expected[name] = expected.get(name, 0) + clipped
    for name, param in model.named_parameters():
        assert param.grad is not None
        assert_close(param.grad, expected[name], 1e-5)


def test_two_forwards_and_one_backward() -> None:
    case = CASES["linear_3d"]
    model, (x,) = make_case(case, torch.float32)
    truth = per_sample_truth(
        model, (x, x * 2), lambda m, b: case.loss(m, b[:1]) + case.loss(m, b[1:])
    )
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        (case.loss(module, (x,)) + case.loss(module, (x * 2,))).mean().backward()
        check_case(module, truth, 0.5, 1e-5)


@pytest.mark.parametrize("clipping", ["flat", slow("per_layer")])
def test_two_passes(clipping: str) -> None:
    model, batch = make_case(LM, torch.float32)
    bound: Any = 0.5 if clipping == "flat" else [0.1] * len([*model.parameters()])
    eager = wrap(copy.deepcopy(model), max_grad_norm=bound, clipping=clipping)
    module = wrap(model, max_grad_norm=bound, clipping=clipping, mode="two_pass")
    module.compile(backend="aot_eager", fullgraph=True)
    for which in (eager, module):
        lm_loss(which, batch).mean().backward()
    assert_close(module.get_norm_sample(), eager.get_norm_sample(), 1e-5)
    for p, q in zip(model.parameters(), eager._module.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert_close(p.grad, q.grad, 1e-5)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_a_layer_inside_and_outside_of_a_block(mode: Any) -> None:
    """Uses inside a compiled block count as those outside do."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.block[0](self.block(x))

    case = Case(Both, floats(5, 3, 4))
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    model.block.compile(backend="aot_eager", fullgraph=True)
    compare(wrap(model, max_grad_norm=0.5, mode=mode), truth, case, batch, 0.5)


@pytest.mark.slow
def test_a_wrapped_model_that_is_compiled_from_outside() -> None:
    """Its hooks break the graph, and so does every layer."""
    case = CASES["linear_3d"]
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    module = wrap(model, max_grad_norm=0.5)
    compiled = torch.compile(module, backend="aot_eager")
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        case.loss(compiled, batch).mean().backward()
        check_case(module, truth, 0.5, 1e-5)


# -- what is not wired -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["generic", "torch_attention", slow("embedding_bag_sum"), slow("mixed")]
)
def test_other_layers_break_the_graph(name: str) -> None:
    case = CASES[name]
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound = bound_between(truth)
    module = wrap(model, max_grad_norm=bound)
    module.compile(backend="aot_eager")
    compare(module, truth, case, batch, bound)


def test_without_breaks_other_layers_are_refused() -> None:
    case = CASES["embedding_bag_sum"]
    model, batch = make_case(case, torch.float32)
    module = wrap(model)
    module.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(FlashClippingError, match=r"EmbeddingBagRule cannot be traced"):
        case.loss(module, batch)


def test_a_layer_on_both_sides_of_a_break() -> None:
    """What follows a break does not use the wires again."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.layer(x))
            torch._dynamo.graph_break()
            for _ in range(2):
                x = self.half(x)
            return x

        def half(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.layer(x))
            torch._dynamo.graph_break()
            return x + 1

    case = Case(Broken, floats(5, 3, 4))
    model, batch = make_case(case, torch.float32)
    plain = copy.deepcopy(model)
    eager = wrap(plain, max_grad_norm=0.5)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager")
    for _ in range(3):
        for which in (eager, module):
            which.zero_grad(set_to_none=True)
            step_case(which, case, batch, "mean")
        assert_close(module.get_norm_sample(), eager.get_norm_sample(), 1e-5)
        assert_close(model.layer.weight.grad, plain.layer.weight.grad, 1e-5)


def test_a_layer_that_a_block_borrows() -> None:
    """Numbers of taps are those of the region that runs: of a layer outside there is none."""

    class Borrowing(nn.Module):
        def __init__(self, lent: list[nn.Module]):
            super().__init__()
            self.own, self.lent = nn.Linear(4, 4), lent

        def forward(self, x: Tensor) -> Tensor:
            return self.own(torch.tanh(self.lent[0](x)))

    class Lending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.block = Borrowing([self.layer])

        def forward(self, x: Tensor) -> Tensor:
            return self.block(torch.tanh(self.layer(x)))

    case = Case(Lending, floats(5, 3, 4))
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    model.layer.compile(backend="aot_eager")
    model.block.compile(backend="aot_eager")
    compare(wrap(model, max_grad_norm=0.5), truth, case, batch, 0.5)


@pytest.mark.parametrize("fullgraph", [slow(False), True])
def test_shapes_that_were_told_wrong_are_learned_anew(fullgraph: bool) -> None:
    class Halved(nn.Module):
        """Rounds down: what follows from an even length is wrong for an odd one."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.second(x[:, : x.shape[1] // 2])

    model, _ = make_case(Case(Halved, floats(5, 4, 4)), torch.float32)
    plain = copy.deepcopy(model)
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=fullgraph)
    for length in (4, 8, 7, 7, 12, 9):
        batch = (torch.randn(5, length, 4),)
        truth = per_sample_truth(plain, batch, squared_loss)
        compare(module, truth, Case(Halved, lambda: (), squared_loss), batch, 0.5, steps=1)


def test_wires_of_a_wrong_shape_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd would add up what arrives for a wire with fewer rows."""
    case = CASES["linear_3d"]
    model, batch = make_case(case, torch.float32)
    module = wrap(model)
    module.compile(backend="aot_eager", fullgraph=True)
    learn = Region._learn

    def wrong(self: Region, *args: Any) -> Any:
        calls = learn(self, *args)
        return [
            [Seen((1, *s.x_shape[1:]), s.x_dtype, s.y_shape, s.y_dtype) for s in of_tap]
            for of_tap in calls
        ]

    monkeypatch.setattr(Region, "_learn", wrong)
    with pytest.raises(Exception, match="by_itself"):
        case.loss(module, batch)


def test_affine_shapes() -> None:
    def calls(B: int, T: int) -> Any:
        return [[Seen((B, T, 4), torch.float32, (B, 2 * T + 1), torch.float32)]]

    shapes = Affine()
    assert shapes.find([4, 6]) is None
    shapes.add([4, 6], calls(4, 6))
    assert shapes.find([4, 6]) == calls(4, 6)
    assert shapes.find([5, 6]) is None
    shapes.add([6, 7], calls(6, 7))
    assert shapes.find([8, 8]) == calls(8, 8)
    assert shapes.find([8, 6]) is None
    shapes.add([8, 6], calls(8, 6))
    assert shapes.find([1, 30]) == calls(1, 30)
    shapes.add([8, 8], calls(8, 9))
    assert shapes.find([1, 30]) is None


# -- end to end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap_model", [True, slow(False)])
def test_engine_with_poisson_batches(wrap_model: bool) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 5, 4), torch.randint(0, 3, (24,)))

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(torch.relu(self.first(x))).mean(1))

    def train(compiled: bool) -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(1)
        model: Any = Classifier()
        hooks: Any = None
        loader: Any
        sizes: list[int] = []
        engine = FlashPrivacyEngine()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, batch_size=2)
        params = [*model.parameters()]
        found = engine.make_private(
            module=model,
            optimizer=optimizer,
            criterion=nn.CrossEntropyLoss(),
            data_loader=loader,
            noise_multiplier=0.0,
            max_grad_norm=0.5,
            **({} if wrap_model else {"wrap_model": False}),
        )
        hooks, optimizer, criterion, loader = found
        if compiled:
            hooks.compile(backend="aot_eager", fullgraph=True)
        run = hooks if wrap_model else model
        for _ in range(2):
            for x, y in loader:
                sizes.append(len(x))
                optimizer.zero_grad()
                criterion(run(x), y).backward()
                optimizer.step()
        return [p.detach() for p in params], sizes

    torch.manual_seed(0)
    eager, sizes = train(False)
    torch.manual_seed(0)
    compiled, same = train(True)
    assert sizes == same and 0 in sizes and len(set(sizes)) > 3
    for p, q in zip(eager, compiled, strict=True):
        assert_close(q, p, 1e-5)


def test_hooks_without_a_wrapper() -> None:
    case = CASES["linear_3d"]
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    hooks = GradSampleHooksFlashClipping(model, max_grad_norm=0.5)
    backend = Backend()
    hooks.compile(backend=backend, fullgraph=True)
    case.loss(model, batch).mean().backward()
    assert_close(hooks.get_norm_sample(), truth.norms, 1e-5)
    assert backend.graphs == 1


def test_copies_are_not_compiled() -> None:
    case = CASES["linear_3d"]
    model, batch = make_case(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    backend = Backend()
    module = wrap(model, max_grad_norm=0.5)
    module.compile(backend=backend, fullgraph=True)
    step_case(module, case, batch, "mean")
    other = copy.deepcopy(module)
    for which in (other, module):
        which.zero_grad(set_to_none=True)
        step_case(which, case, batch, "mean")
        check_case(which, truth, 0.5, 1e-5)
    assert backend.graphs == 1


def test_the_model_comes_back_as_it_was() -> None:
    case = CASES["linear_3d"]
    model, batch = make_case(case, torch.float32)
    module = wrap(model)
    module.compile(backend="eager")
    step_case(module, case, batch, "mean")
    plain = module.to_standard_module()
    assert plain is model and not any("forward" in vars(m) for m in model.modules())


def test_dropout_draws_as_without_wires() -> None:
    """Learning shapes leaves generators as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    plain, x = copy.deepcopy(model), torch.randn(5, 4)
    module = wrap(model)
    module.compile(backend="aot_eager", fullgraph=True)
    outputs: list[Tensor] = []
    run: Callable[[Tensor], Tensor]
    for run in (plain, module, module):
        torch.manual_seed(3)
        outputs.append(run(x))
    assert_close(outputs[1], outputs[0], 1e-6)
    assert_close(outputs[2], outputs[0], 1e-6)


# -- programs that compiled code runs and rehearsals might not -------------------------------------


class Switched(nn.Module):
    """Uses ``mid`` as an ordinary layer, and in another way once ``on``."""

    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.mid = nn.Linear(4, 4), nn.Linear(4, 4)
        self.use, self.on = use, False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.use(self.mid, x) if self.on else self.mid(x)


def with_other_weights(mid: nn.Module, x: Tensor) -> Tensor:
    doubled = {name: param * 2 for name, param in mid.named_parameters()}
    return torch.func.functional_call(mid, doubled, (x,))


def with_its_derivative(mid: nn.Module, x: Tensor) -> Tensor:
    y, vjp = torch.func.vjp(mid, x)
    return y + vjp(x)[0]


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("use", [with_other_weights, with_its_derivative])
def test_what_is_refused_uncompiled_is_no_number_when_compiled(
    use: Callable[[nn.Module, Tensor], Tensor], fullgraph: bool
) -> None:
    """Also where the model changes its ways after it was proven."""
    torch.manual_seed(0)
    model = Switched(use)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=fullgraph)
    x = torch.randn(5, 3, 4)
    squared_loss(module, (x,)).mean().backward()
    module.zero_grad(set_to_none=True)
    model.on = True
    with pytest.raises((FlashClippingError, RuntimeError)):
        squared_loss(module, (x,)).mean().backward()


def test_rows_that_only_compiled_code_mixes_are_refused() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mid = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            if torch.compiler.is_compiling():
                return self.mid(x.flip(0)).flip(0)
            return self.mid(x)

    module = GradSampleModuleFlashClipping(Mixed(), max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(FlashClippingError, match=r"mid \(Linear\): what it reads has a row"):
        squared_loss(module, (torch.randn(5, 3, 4),)).mean().backward()


def test_a_subgraph_that_is_run_several_times_has_no_wires() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mid = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.block(self.block(self.block(x)))

        @torch.compiler.nested_compile_region
        def block(self, x: Tensor) -> Tensor:
            return torch.tanh(self.mid(x))

    torch.manual_seed(0)
    model = Nested()
    x = torch.randn(5, 3, 4)
    truth = per_sample_truth(copy.deepcopy(model), (x,), squared_loss)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    try:
        squared_loss(module, (x,)).mean().backward()
    except RuntimeError:
        return  # Dynamo, or this library, refused
    assert_close(module.get_norm_sample(), truth.norms, 1e-5, "norms")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_without_eps(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.RMSNorm(6)).to(dtype)
    x = (torch.randn(4, 3, 6) * 1e-3).to(dtype)
    expected = copy.deepcopy(model)(x)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=0.5)
    module.compile(backend="aot_eager", fullgraph=True)
    assert_close(module(x).float(), expected.float(), 1e-2, "outputs")
