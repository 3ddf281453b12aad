"""Models that are hooked, not wrapped."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine
from tests.support.engine import EngineTraining, convolutional_network
from tests.support.sums import note_sums
from tests.support.wrapping import MODES


def tiny_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=31,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config).double()


def own_loss_norms(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms of all samples' gradients by plain autograd, one sample at a time; the gradients."""
    grads: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for row in ids:
        model.zero_grad()
        model(input_ids=row[None], labels=row[None]).loss.backward()
        for name, param in model.named_parameters():
            grads[name].append(param.grad.clone())
    model.zero_grad()
    stacked = {name: torch.stack(parts) for name, parts in grads.items()}
    squares = [value.flatten(1).square().sum(1) for value in stacked.values()]
    return torch.stack(squares).sum(0).sqrt(), stacked


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap_model", [True, False])
def test_gpt2_with_its_own_loss(wrap_model: bool, mode: str) -> None:
    """``position_ids`` of shape [1, T], a head tied to the embedding, a loss inside the model."""
    model = tiny_gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    ids = torch.randint(0, 31, (5, 9))
    norms, grads = own_loss_norms(model, ids)
    bound = norms.median().item()
    engine = FlashPrivacyEngine()
    wrapper, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(ids), batch_size=5),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        poisson_sampling=False,
        wrap_model=wrap_model,
        mode=mode,
    )
    callable_model = wrapper if wrap_model else model
    for _ in range(2):
        optimizer.zero_grad()
        outputs = callable_model(input_ids=ids, labels=ids)
        outputs.loss.backward()
        # The model is in float64, but transformers computes the loss in float32.
        torch.testing.assert_close(wrapper.get_norm_sample(), norms, rtol=1e-6, atol=0)
        coef = (bound / (norms + 1e-6)).clamp(max=1)
        for name, param in model.named_parameters():
            clipped = torch.einsum("b,b...->...", coef, grads[name])
            torch.testing.assert_close(param.grad, clipped, rtol=1e-5, atol=1e-7)
    sums = note_sums(optimizer)
    optimizer.step()
    for param, summed in zip(model.parameters(), sums[0], strict=True):
        assert param.grad is not None
        assert (param.grad * 5 - summed).abs().max() < 1e-12


def test_unwrapped_model_is_left_as_it_was() -> None:
    training = EngineTraining(FlashPrivacyEngine(), wrap_model=False, poisson_sampling=False)
    names = set(convolutional_network().state_dict())
    assert set(training.plain.state_dict()) == names
    assert type(training.plain) is nn.Sequential
    training.steps(1)
    training.wrapper.cleanup()
    reference = convolutional_network()
    reference.load_state_dict(training.plain.state_dict())
    x, y = next(iter(training.loader))
    for model in (training.plain, reference):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
    for found, expected in zip(training.plain.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    for module in training.plain.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks and not module._forward_pre_hooks
