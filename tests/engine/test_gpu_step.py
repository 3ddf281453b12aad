"""A whole step on a GPU: it waits for nothing, gives the same bits again, and is exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import FlashPrivacyEngine, GradSampleModuleFlashClipping
from tests.support.models import CASES, Case, Wrapped
from tests.support.oracle import assert_close, per_sample_truth

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def convolutions_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's default is TF32, which would be the model's own error of 1e-4."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def on_gpu(case: Case, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = case.make().to("cuda", dtype)
    batch = case.batch()
    return model, tuple(x.to("cuda", dtype if x.is_floating_point() else x.dtype) for x in batch)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", CASES)
def test_rule_matches_oracle_on_the_gpu(name: str, mode: str) -> None:
    case = CASES[name]
    model, batch = on_gpu(case, torch.float32)
    truth = per_sample_truth(model, batch, case.loss)
    bound = truth.norms.median().item()
    module = GradSampleModuleFlashClipping(model, max_grad_norm=bound, mode=mode)
    case.loss(module, batch).mean().backward()
    # The model's own forward and backward run in fp32 on the GPU: 1e-4 is theirs, not the norms'.
    assert_close(module.get_norm_sample(), truth.norms, 1e-4, "norms")
    clipped = truth.clipped(bound)
    for param_name, param in model.named_parameters():
        assert_close(param.grad, clipped[param_name], 1e-3, param_name)


# The model's own forward and backward in these dtypes are no nearer.
@pytest.mark.parametrize(
    ("dtype", "of_norms", "of_sums"), [(torch.float32, 1e-4, 1e-3), (torch.bfloat16, 2e-2, 5e-2)]
)
def test_adapters(dtype: torch.dtype, of_norms: float, of_sums: float) -> None:
    """Narrow layers at many positions: their gradients are kept, and taken together at the end."""
    shapes = [(64, 8), (8, 64), (64, 8), (8, 96), (96, 8), (8, 64)]
    case = Case(
        lambda: Wrapped(*(nn.Linear(*shape, bias=False) for shape in shapes)),
        lambda: (torch.randn(4, 300, 64),),
    )
    model, batch = on_gpu(case, dtype)
    truth = per_sample_truth(model, batch, case.loss)
    bound = truth.norms.median().item()
    module = GradSampleModuleFlashClipping(model, max_grad_norm=bound)
    for _ in range(2):  # the second time as remembered
        module.zero_grad(set_to_none=True)
        case.loss(module, batch).mean().backward()
    (plan,) = [plan for _, plan in module._session.calls.plans._plans.values()]
    assert [len(keys) for keys in plan.vectors] == [2, 2]  # those that have a shape in common
    assert len(plan.stored) == 2 and not plan.linear
    assert_close(module.get_norm_sample(), truth.norms, of_norms, "norms")
    clipped = truth.clipped(bound)
    for name, param in model.named_parameters():
        assert_close(param.grad, clipped[name], of_sums, name)


def step_without_waiting(mode: str) -> Tensor:
    case = CASES["mixed"]
    model, batch = on_gpu(case, torch.bfloat16)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, mode=mode)
    for warm in (False, True):
        module.zero_grad(set_to_none=True)
        if warm:  # the first step compiles kernels and proves rows
            torch.cuda.set_sync_debug_mode("error")
        try:
            case.loss(module, batch).mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return torch.cat([p.grad.flatten().float() for p in model.parameters()])


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_a_step_never_waits_and_repeats_bitwise(mode: str) -> None:
    first = step_without_waiting(mode)
    assert torch.isfinite(first).all()
    assert torch.equal(first, step_without_waiting(mode))


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_everything_runs_on_the_stream_of_the_caller(mode: str) -> None:
    """Nothing reads on another stream what this one has yet to write."""
    case = CASES["mixed"]
    model, batch = on_gpu(case, torch.float32)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, mode=mode)
    case.loss(module, batch).mean().backward()
    expected = [p.grad for p in model.parameters()]
    torch.cuda.synchronize()
    streams: list[int] = []
    clip = module._session.options.clip

    def note_stream(*args: object) -> Tensor:
        streams.append(torch.cuda.current_stream().cuda_stream)
        return clip(*args)

    module._session.options.clip = note_stream
    side = torch.cuda.Stream()
    for _ in range(30):  # which of autograd's threads ends a backward differs from time to time
        module.zero_grad(set_to_none=True)
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            late = [x.clone() for x in batch]
            case.loss(module, late).mean().backward()
        side.synchronize()
        for param, grad in zip(model.parameters(), expected, strict=True):
            assert torch.equal(param.grad, grad)
    assert set(streams) == {side.cuda_stream}


class TwoDevices(nn.Module):
    """Layers that take gram norms, stored gradients, stacked vectors and products of every kind."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64))
        self.two = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 8))
        self.one.to(first)
        self.two.to(second)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.two(x.to(self.two[0].weight.device))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("positions", [8, 96, 600])
def test_a_model_on_two_devices(positions: int, mode: str, clipping: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, positions, 64, device="cuda:0", dtype=torch.bfloat16)
    x[2, 3] = float("inf")  # dropped on both devices
    found = []
    for second in ("cuda:0", "cuda:1"):
        torch.manual_seed(1)
        model = TwoDevices("cuda:0", second).to(torch.bfloat16)
        bound = [0.5] * len(list(model.parameters())) if clipping == "per_layer" else 0.5
        module = GradSampleModuleFlashClipping(
            model, max_grad_norm=bound, mode=mode, clipping=clipping
        )
        module(x).float().square().sum((1, 2)).mean().backward()
        norms = module.get_norm_sample().cpu()
        found.append((norms, [p.grad.cpu() for p in model.parameters()]))
        assert all(p.grad.device == p.device for p in model.parameters())
    (norms, grads), (norms_of_two, grads_of_two) = found
    assert not norms[2].isfinite() and norms[[0, 1, 3]].isfinite().all()
    torch.testing.assert_close(norms, norms_of_two, rtol=1e-5, atol=0, equal_nan=True)
    for grad, grad_of_two in zip(grads, grads_of_two, strict=True):
        assert torch.isfinite(grad_of_two).all()
        torch.testing.assert_close(grad, grad_of_two, rtol=1e-2, atol=1e-4)


def test_training_through_the_engine() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).cuda()
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    engine = FlashPrivacyEngine()
    module, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        data_loader=torch.utils.data.DataLoader(data, batch_size=16),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        criterion(module(x.cuda()), y.cuda()).backward()
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert engine.get_epsilon(1e-5) > 0
