"""``cuda_graphs="auto"`` on a GPU: replays are the calls, bit by bit, or there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.graphs.graphed_model import replay_calls
from tests.support.graphs import assert_same_tensors
from tests.support.models import CASES
from tests.support.oracle import assert_close

pytestmark = pytest.mark.gpu

Step = Callable[[Any, tuple[Tensor, ...]], Tensor]


def results(model: Any, loss: Step, batch: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    value = loss(model, batch).mean()
    value.backward()
    grads = [p.grad.clone() for p in model._module.parameters() if p.grad is not None]
    return [value.detach(), model.get_norm_sample(), *grads]


def pair(plain: nn.Module, **options: Any) -> tuple[Any, Any]:
    """The same model with graphs and without."""
    import copy

    other = copy.deepcopy(plain)
    graphed = GradSampleModuleFlashClipping(plain, max_grad_norm=0.5, **options)
    replay_calls(graphed)
    return graphed, GradSampleModuleFlashClipping(other, max_grad_norm=0.5, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_rule(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    plain = case.make().to("cuda", dtype)
    drawn = [case.batch() for _ in range(2)]
    first, second = [
        tuple(x.to("cuda", dtype if x.is_floating_point() else x.dtype) for x in batch)
        for batch in drawn
    ]
    graphed, eager = pair(plain)
    for batch in [first] * 4 + [second, first, second]:
        found, expected = results(graphed, case.loss, batch), results(eager, case.loss, batch)
        if name == "conv2d_reflect":  # PyTorch's own backward adds in any order
            for a, b in zip(found, expected, strict=True):
                assert_close(a, b, 1e-5 if dtype == torch.float32 else 1e-2, name)
        else:
            assert_same_tensors(found, expected)
    assert graphed._graphs.off is None
    assert graphed._graphs.replays == 4


def transformer(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout, batch_first=True)
    return nn.Sequential(nn.Linear(8, 32), layer, nn.Linear(32, 4)).to("cuda")


def squares(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    losses: Tensor = model(*batch).float().square().flatten(1).mean(1)
    return losses


def inputs(seed: int) -> tuple[Tensor, ...]:
    return (torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(seed)).to("cuda"),)


def test_dropout_is_drawn_anew_in_every_replay() -> None:
    graphed, _ = pair(transformer(0.5))
    found = [results(graphed, squares, inputs(0))[1] for _ in range(8)]
    assert graphed._graphs.replays == 5
    for i, one in enumerate(found):
        assert not any(torch.equal(one, other) for other in found[:i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_with_scaled_losses(dtype: torch.dtype) -> None:
    graphed, eager = pair(transformer(0.0))

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.autocast("cuda", dtype=dtype):
            return squares(model, batch)

    for seed in range(7):
        assert_same_tensors(
            results(graphed, loss, inputs(seed)), results(eager, loss, inputs(seed))
        )
    assert graphed._graphs.replays == 4


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if y.isfinite().all() else y * 0


class Checkpointed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.settings = options

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layers, x, use_reentrant=False, **self.settings)
        return y


def test_training_goes_on_where_nothing_can_be_captured() -> None:
    torch.manual_seed(0)
    graphed, eager = pair(Waiting().to("cuda"))
    for seed in range(8):
        assert_same_tensors(
            results(graphed, squares, inputs(seed)), results(eager, squares, inputs(seed))
        )
    assert graphed._graphs.replays == 0 and "waits" in graphed._graphs.off
    torch.cuda.synchronize()
    # Other models are captured afterwards.
    again, _ = pair(transformer(0.0))
    for seed in range(6):
        results(again, squares, inputs(seed))
    assert again._graphs.replays == 3


class WaitsInCaptures(Waiting):
    def forward(self, x: Tensor) -> Tensor:
        if torch._C._cuda_isCurrentStreamCapturing():  # whatever a model is told
            torch.cuda.current_stream().synchronize()
        y: Tensor = self.layer(x)
        return y


def test_training_goes_on_after_a_capture_that_fails() -> None:
    torch.manual_seed(0)
    graphed, eager = pair(WaitsInCaptures().to("cuda"))
    for seed in range(6):
        assert_same_tensors(
            results(graphed, squares, inputs(seed)), results(eager, squares, inputs(seed))
        )
    assert "could not be captured" in graphed._graphs.off
    # Random numbers are drawn, and other models captured, as if nothing had happened.
    again, _ = pair(transformer(0.5))
    found = [results(again, squares, inputs(0))[1] for _ in range(6)]
    assert again._graphs.replays == 3
    assert not any(torch.equal(x, y) for x, y in zip(found, found[1:], strict=False))


def test_checkpoints_that_keep_no_randomness_are_replayed() -> None:
    torch.manual_seed(0)
    graphed, eager = pair(Checkpointed(preserve_rng_state=False).to("cuda"))
    for seed in range(8):
        assert_same_tensors(
            results(graphed, squares, inputs(seed)), results(eager, squares, inputs(seed))
        )
    assert graphed._graphs.replays == 5


def test_a_language_model_that_computes_its_loss() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    graphed, eager = pair(transformers.GPT2LMHeadModel(config).to("cuda"))

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        found: Tensor = model(input_ids=batch[0], labels=batch[0]).loss
        return found

    for seed in range(8):
        ids = torch.randint(128, (6, 16), generator=torch.Generator().manual_seed(seed))
        batch = (ids.to("cuda"),)
        assert_same_tensors(results(graphed, loss, batch), results(eager, loss, batch))
    assert graphed._graphs.replays == 5


def test_a_trainer_replays_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    from tests.support.trainers import trained_with

    (found, replays), (expected, _) = (
        trained_with(tmp_path, g, use_cpu=False) for g in ("auto", "off")
    )
    assert replays > 10
    assert_same_tensors(found, expected)
