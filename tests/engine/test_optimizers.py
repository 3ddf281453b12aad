"""Several optimizers: of one model, of several models, and plain ones beside private ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import DataLoader

import flash_clipping
from flash_clipping import (
    FlashClippingError,
    FlashDPOptimizer,
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
    PoissonSampling,
)
from flash_clipping.engine import privacy_engine
from tests.support.errors import raises
from tests.support.private import SLACK, Private, Released, TwoLayers, data


@pytest.mark.parametrize("wrap_model", [True, False])
def test_two_optimizers_on_one_model(wrap_model: bool) -> None:
    model = TwoLayers()
    first = Private(model, wrap_model=wrap_model)
    second = first.wrapper if wrap_model else model
    with raises("FC172|FC530", ValueError):
        Private(second, parameters=[*model.parameters()], wrap_model=wrap_model)
    another = FlashDPOptimizer(
        torch.optim.SGD(model.head.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
    )
    with raises("FC530", ValueError):
        another.follow(first.wrapper)
    assert first.wrapper.max_grad_norm == 0.1
    first.wrapper.cleanup()
    fresh = Private(model)
    fresh.step()


def test_private_again_with_the_same_optimizer(released: Released) -> None:
    private = Private()
    private.step()
    model, optimizer, criterion, _ = private.engine.make_private(
        module=private.wrapper,
        optimizer=private.optimizer,
        data_loader=DataLoader(data(), batch_size=16),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=0.02,
        poisson_sampling=False,
    )
    assert model is private.wrapper and model.max_grad_norm == optimizer.max_grad_norm == 0.02
    x, y = (part[:1] for part in data().tensors)
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    with raises("FC531", ValueError):
        private.optimizer.step()
    optimizer.step()
    assert released.releases[-1][1] == pytest.approx(0.02) and released.ratio() <= SLACK


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_wrapped_model_have_no_optimizer(copied: Callable[[Any], Any]) -> None:
    private = Private()
    private.step()
    private.backward()
    twin = copied(private.wrapper)
    assert twin.backward_count == 0 and twin.running_step.follower is None
    x, y = (part[:4] for part in data().tensors)
    for module in (private.wrapper, twin):
        module.zero_grad(set_to_none=True)
        F.cross_entropy(module(x), y).backward()
    for p, q in zip(private.wrapper.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    twin._module.head = nn.Linear(8, 3)
    with raises("FC170", match="head"):
        twin(x)
    private.wrapper(x)


# -- optimizers of parts of a model ----------------------------------------------------------------


@pytest.mark.parametrize("wrap_model", [True, False])
def test_an_optimizer_that_lacks_parameters_is_refused(wrap_model: bool) -> None:
    """Each line of the message mends it, and the model is as it was."""
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
    for _ in range(2):
        with raises("FC535", ValueError, match=r"without 2.*head\.weight") as error:
            Private(model, optimizer=optimizer, wrap_model=wrap_model)
    lines = [line for line in str(error.value).split("\n") if line.startswith("    ")]
    frozen = copy.deepcopy(model)
    exec(lines[2].strip(), {"model": frozen})
    of_body = torch.optim.SGD(frozen.body.parameters(), lr=0.1)
    Private(frozen, optimizer=of_body, wrap_model=wrap_model).step()
    other = torch.optim.SGD(model.head.parameters(), lr=0.1)
    given = {"flash_clipping": flash_clipping, "optimizer": optimizer, "other": other}
    exec(lines[1].strip(), given)
    held = [p for group in given["optimizer"].param_groups for p in group["params"]]
    assert {*held} == {*model.parameters()}
    exec(lines[0].strip(), {"model": model, "optimizer": optimizer})
    private = Private(model, optimizer=optimizer, wrap_model=wrap_model)
    before = copy.deepcopy(model.state_dict())
    private.step()
    assert not any(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("wrap_model", [True, False])
def test_parameters_unfrozen_later_are_the_optimizer_s_too(wrap_model: bool) -> None:
    model = TwoLayers()
    model.body.requires_grad_(False)
    of_head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    private = Private(model, optimizer=of_head, wrap_model=wrap_model)
    private.step()
    model.body.requires_grad_(True)
    private.optimizer.zero_grad()
    private.backward()
    before = copy.deepcopy(model.state_dict())
    with raises("FC535", ValueError, match=r"without 2 of .*body\.0\.weight") as error:
        private.optimizer.step()
    with raises("FC539", match="AdamW itself"):
        torch.optim.AdamW(model.body.parameters()).step()
    lines = [line for line in str(error.value).split("\n") if line.startswith("    ")]
    exec(lines[0].strip(), {"model": private.model, "optimizer": private.optimizer})
    private.step()
    assert not any(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("multiplier", [-1.0, float("nan"), float("inf")])
def test_noise_of_no_standard_deviation_is_refused(multiplier: float) -> None:
    """Also where a schedule sets it, after ``make_private``."""
    private = Private()
    private.step()
    before = [p.detach().clone() for p in private.plain.parameters()]
    private.optimizer.noise_multiplier = multiplier
    with raises("FC521", ValueError):
        private.step()
    assert all(map(torch.equal, before, private.plain.parameters()))


def test_shards_need_a_model_that_was_sharded_when_it_was_wrapped() -> None:
    model = nn.Linear(3, 2)
    model.weight.placements = ()  # as of a DTensor
    optimizer = FlashDPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
    )
    with raises("FC605", ValueError):
        optimizer.step()
    del model.weight.placements
    with raises("FC605", ValueError):
        optimizer.follow(GradSampleModuleFlashClipping(model))


def test_shards_inside_of_data_parallel_have_noise_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``fully_shard`` was applied to what Opacus' data parallelism is around."""
    monkeypatch.setattr(privacy_engine, "has_shards", lambda module: True)
    module = object.__new__(DPDDP)
    nn.Module.__init__(module)
    given: Any = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "loss_reduction": "mean"}
    given |= {"module": module, "optimizer": torch.optim.SGD(nn.Linear(2, 1).parameters())}
    made = FlashPrivacyEngine()._optimizer({**given, "process": PoissonSampling()}, 8.0, None)
    assert type(made) is FlashDPOptimizer and made.expected_batch_size == 8.0


def test_sparse_adam_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    with raises("FC534", ValueError):
        Private(model, optimizer=torch.optim.SparseAdam(model.parameters()))


@pytest.mark.parametrize("wrap_model", [True, False])
def test_a_new_optimizer_of_private_parameters_is_refused(wrap_model: bool) -> None:
    private = Private(TwoLayers(), wrap_model=wrap_model)
    model = private.plain
    private.step()
    before = copy.deepcopy(model.state_dict())
    of_all, of_head = (
        torch.optim.AdamW(model.parameters()),
        torch.optim.SGD(model.head.parameters()),
    )
    of_other = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    of_other.param_groups[0]["params"][0].grad = torch.ones(3)
    private.optimizer.zero_grad()
    private.backward(4)
    of_other.step()
    for new in (of_all, of_head):
        with raises("FC539", match=f"a step of {type(new).__name__} itself"):
            new.step()
    lbfgs = torch.optim.LBFGS(model.parameters())

    def closure() -> Any:
        private.optimizer.zero_grad()
        private.backward(4)
        return torch.zeros(())

    private.optimizer.zero_grad()
    of_all.step()  # nothing is there
    for arguments in ((closure,), ()):
        with raises("FC539", match="LBFGS itself"):
            lbfgs.step(*arguments, **({} if arguments else {"closure": closure}))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    private.wrapper.disable_hooks()  # data that are public
    private.optimizer.zero_grad()
    private.backward(4)
    of_head.step()
    of_all.step(lambda: 1.0)
    assert not torch.equal(model.head.weight, before["head.weight"])


def test_steps_of_two_private_models_in_turn() -> None:
    """As of a generator and a discriminator: sums of one wait while the other steps."""
    first, second = Private(TwoLayers()), Private(TwoLayers())
    for _ in range(2):
        for private in (first, second):
            private.optimizer.zero_grad()
            private.backward(4)
        first.optimizer.step()
        second.optimizer.step()
    assert len(first.engine.accountant.history) == len(second.engine.accountant.history) == 1


# -- the optimizer that was given to make_private -------------------------------------------------


@pytest.mark.parametrize("wrap_model", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_of_the_plain_optimizer_is_refused(wrap_model: bool, optimizer: Any) -> None:
    model = TwoLayers()
    plain = optimizer(model.parameters(), lr=0.1)
    private = Private(model, optimizer=plain, wrap_model=wrap_model)
    before = copy.deepcopy(model.state_dict())
    private.backward(4)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # changed sums are no less of samples
    with raises("FC539", match=f"found a step of {optimizer.__name__} itself"):
        plain.step()
    private.optimizer.zero_grad()

    def closure() -> float:
        private.backward(4)
        return 1.0

    for arguments in ({"closure": closure}, {}):
        with raises("FC539"):
            plain.step(*([] if arguments else [closure]), **arguments)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert not private.engine.accountant.history
    private.step(4)
    assert len(private.engine.accountant.history) == 1
    for name, value in model.state_dict().items():
        assert not torch.equal(value, before[name])


def _refuses(plain: Any, private: Private) -> bool:
    private.optimizer.zero_grad()
    private.backward(4)
    try:
        plain.step()
    except FlashClippingError:
        private.optimizer.step()
        return True
    return False


@pytest.mark.parametrize("wrap_model", [True, False])
def test_the_plain_optimizer_steps_without_privacy(wrap_model: bool) -> None:
    model = TwoLayers()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    private = Private(model, optimizer=plain, wrap_model=wrap_model)
    assert _refuses(plain, private)
    plain.step()  # what was released is in p.grad
    private.optimizer.zero_grad()
    plain.step()
    private.wrapper.disable_hooks()  # data that are public
    private.backward(4)
    plain.step()
    private.wrapper.enable_hooks()
    private.optimizer.zero_grad()
    assert _refuses(plain, private)
    if wrap_model:
        assert private.wrapper.to_standard_module() is model
    else:
        private.wrapper.cleanup()
    assert not plain._optimizer_step_pre_hooks
    before = copy.deepcopy(model.state_dict())
    model(data().tensors[0]).sum().backward()
    plain.step()
    assert not torch.equal(model.head.bias, before["head.bias"])
    again = Private(model, optimizer=plain)
    assert _refuses(plain, again)


def test_states_are_made_by_a_step_of_zeros() -> None:
    model = TwoLayers()
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    private = Private(model, optimizer=plain)
    private.backward(4)
    private.optimizer.zero_grad()
    _, state = get_state_dict(model, plain)
    assert len(state["state"]) == len([*model.parameters()])


def test_parameters_that_the_wrapper_does_not_know(released: Released) -> None:
    """Were released as they were: 29 at a bound of 0.01."""
    private = Private(max_grad_norm=0.01)
    extra = nn.Linear(6, 3)
    with raises("FC170", ValueError, match="add_param_group.*.3, 6."):
        private.optimizer.add_param_group({"params": extra.parameters()})
    for group in (
        private.optimizer.original_optimizer.add_param_group,
        private.optimizer.param_groups.append,
    ):
        group({"params": [*nn.Linear(6, 3).parameters()], "lr": 0.1})
    x, y = (part[:1] for part in data().tensors)
    extra_layers = private.optimizer.param_groups[1]["params"]
    F.cross_entropy(private.model(x) + F.linear(x, *extra_layers), y).backward()
    with raises("FC170", ValueError):
        private.optimizer.step()
    assert not released.releases


def replace_head(private: Private) -> None:
    private.plain.head = nn.Linear(8, 3)


def insert_nested(private: Private) -> None:
    private.plain.body.insert(1, nn.LayerNorm(8))


def put_on_the_wrapper(private: Private) -> None:
    private.wrapper.head = nn.Linear(8, 3)


def late_parameter(private: Private) -> None:
    private.plain.body[1].gain = nn.Parameter(torch.ones(8))


def parametrize(private: Private) -> None:
    nn.utils.parametrizations.weight_norm(private.plain.head)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (replace_head, r"head \(Linear\): its parameter 'weight' came after"),
        (insert_nested, r"body\.1 \(LayerNorm\): its parameter 'weight' came after"),
        (put_on_the_wrapper, r"head \(Linear\): its parameter 'weight' came after"),
        (late_parameter, r"body\.1 \(Tanh\): its parameter 'gain' came after"),
        (parametrize, r"head\.parametrizations\.weight .*came after the model was wrapped"),
    ],
)
def test_layers_that_come_after_wrapping(
    change: Callable[[Private], None], text: str, mode: str
) -> None:
    private = Private(mode=mode)
    private.step()
    change(private)
    with raises("FC170", match=text):
        private.step()


@pytest.mark.parametrize("wrap_model", [True, False])
def test_a_parameter_that_the_first_forward_makes(wrap_model: bool) -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "gain"):
                self.gain = nn.Parameter(torch.ones(8))
            return x * self.gain

    model = TwoLayers()
    model.body.append(Late())
    private = Private(model, wrap_model=wrap_model)
    with raises("FC170", match=r"body\.2 \(Late.*'gain' came"):
        private.backward()


def test_lazy_modules_are_refused_when_they_are_wrapped() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with raises("FC113", NotImplementedError, match=r"0 \(LazyLinear\):"):
        GradSampleModuleFlashClipping(model)


def test_what_has_no_trainable_parameter_may_come_and_go(released: Released) -> None:
    private = Private()
    private.plain.body[1] = nn.ReLU()
    frozen = nn.Linear(3, 3).requires_grad_(False)
    private.plain.after = frozen
    private.wrapper.metric = nn.Identity()
    private.step()
    assert released.ratio() <= SLACK
    frozen.requires_grad_(True)
    with raises("FC170", match=r"after \(Linear\)"):
        private.plain.body.append(nn.Identity())
        private.step()
