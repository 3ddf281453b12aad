"""No file that people save of a model, an optimizer or an engine holds what has no noise yet."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake  # of other tests
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine
from flash_clipping._compat import plain_functions
from tests.support.errors import raises
from tests.support.private import made


def saved(thing: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


class Run:
    """A private run, whose dataset has rows that a file can be searched for."""

    def __init__(self, **options: Any):
        torch.manual_seed(0)
        self.plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.rows = torch.randn(48, 6)
        data = TensorDataset(self.rows, torch.randint(0, 3, (48,)))
        self.engine = FlashPrivacyEngine()
        adam, loader = torch.optim.Adam(self.plain.parameters()), DataLoader(data, batch_size=16)
        private = made(
            self.plain, loader, self.engine, optimizer=adam, max_grad_norm=0.3, **options
        )
        self.model, self.optimizer, self.criterion, self.loader = private
        self.called: Any = self.plain if options.get("wrap_model") is False else self.model
        #: Norms and sums without noise, of all that was run.
        self.secrets: list[Tensor] = []

    def backward(self, x: Tensor, y: Tensor) -> None:
        self.criterion(self.called(x), y).backward()
        norms, ledger = self.model.get_norm_sample(), self.model.running_step
        assert ledger.norms is not None
        self.secrets += [norms, ledger.norms.upper, *ledger.norms.norms_PB]
        self.secrets += [p.grad for p in self.plain.parameters() if p.grad is not None]

    def to(self, where: str) -> Run:
        """Run until right after a backward, into the midst of a step in parts, or past a step."""
        with BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=4, optimizer=self.optimizer
        ) as parts:
            for x, y in parts:
                self.optimizer.zero_grad()
                self.backward(x, y)
                if where == "backward" and len(self.secrets) > 40:
                    break
                self.optimizer.step()
                taken = [x.clone() for x in self.model.running_step.sums.values()]
                self.secrets += taken
                if where == "step" and not taken:
                    break
                if where == "parts" and len(taken) and len(self.secrets) > 40:
                    break
        self.secrets = [x.detach().clone() for x in self.secrets if x.numel() > 2 and x.any()]
        assert len(self.secrets) > 8
        return self


def tensors_of(thing: Any) -> Iterator[Tensor]:
    """All tensors that can be reached from a loaded object."""
    seen: dict[int, Any] = {}
    waiting = [thing]
    skipped = (type, type(gc), type(tensors_of))
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, skipped):
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            yield one
            waiting += [one.__dict__, *([] if one.grad is None else [one.grad])]
        else:
            waiting += gc.get_referents(one)


def check(run: Run, file: bytes, loaded: Any = None) -> None:
    """None of the secrets is in these bytes, nor in what is loaded from them."""
    found = [*tensors_of(loaded)]
    for secret in run.secrets:
        for form in (secret.float(), secret.bfloat16(), secret.double()):
            data = bytes(form.contiguous().flatten().view(torch.uint8).tolist())
            assert data not in file
        assert not any(x.shape == secret.shape and torch.equal(x, secret) for x in found)
    assert bytes(run.rows[:1].view(torch.uint8).flatten().tolist()) not in file


WAYS: dict[str, Callable[[Run], Any]] = {
    "wrapper": lambda run: run.model,
    "copy of the wrapper": lambda run: copy.deepcopy(run.model),
    "model": lambda run: run.plain,
    "copy of the model": lambda run: copy.deepcopy(run.plain),
    "layer": lambda run: run.plain[0],
    "parameters by name": lambda run: dict(run.plain.named_parameters()),
    "list of parameters": lambda run: [*run.plain.parameters()],
    "parameter": lambda run: run.plain[2].weight,
    "copies of parameters": lambda run: copy.deepcopy([*run.plain.parameters()]),
    "state dict": lambda run: run.model.state_dict(),
    "state dict with variables": lambda run: run.plain.state_dict(keep_vars=True),
    "plain optimizer": lambda run: run.optimizer.original_optimizer,
    "groups of the optimizer": lambda run: run.optimizer.param_groups,
    "state of the optimizer": lambda run: run.optimizer.state_dict(),
    "engine": lambda run: run.engine,
    "ledger": lambda run: run.model.running_step,
    "standard module": lambda run: run.model.to_standard_module(),  # the last: it unwraps
}
PLACES = ["backward", "parts", "step"]


@pytest.mark.parametrize("place", PLACES)
def test_no_sum_and_no_norm_in_a_file(place: str) -> None:
    run = Run().to(place)
    for make in WAYS.values():
        thing = make(run)
        check(run, pickle.dumps(thing))
        file = saved(thing)
        check(run, file, torch.load(io.BytesIO(file), weights_only=False))


@pytest.mark.parametrize("place", PLACES)
def test_checkpoint(place: str) -> None:
    run, file = Run().to(place), io.BytesIO()
    run.engine.save_checkpoint(path=file, module=run.model, optimizer=run.optimizer)
    check(run, file.getvalue(), torch.load(io.BytesIO(file.getvalue()), weights_only=False))


def test_the_search_finds_what_is_there() -> None:
    run = Run().to("backward")
    grads = [p.grad for p in run.plain.parameters()]
    with pytest.raises(AssertionError):
        check(run, saved(grads))
    with pytest.raises(AssertionError):
        check(run, b"", {"a": [grads]})


def test_nothing_is_left_after_noise() -> None:
    run = Run().to("step")
    assert not run.model.running_step.sums and run.model.running_step.norms is None
    for ask in (run.model.get_norm_sample, run.model.get_clipping_coef):
        with raises("FC525"):
            ask()
    with pytest.raises(AttributeError):
        _ = run.model.per_sample_gradient_norms
    gc.collect()
    live = [x for x in gc.get_objects() if isinstance(x, Tensor)]
    mine = {id(x) for x in run.secrets}
    with plain_functions():  # of proxies as well, which other tests have left, as compilations do
        for x in live:
            if id(x) not in mine and not is_fake(x) and not x.is_meta:
                assert not any(x.shape == s.shape and torch.equal(x, s) for s in run.secrets)


def test_parameters_load_with_weights_only() -> None:
    run = Run().to("backward")
    file = saved(dict(run.plain.named_parameters()))
    loaded = torch.load(io.BytesIO(file), weights_only=True)
    assert all(torch.equal(loaded[name], p) for name, p in run.plain.named_parameters())


def test_a_pickled_engine_has_no_data_and_another_key() -> None:
    run = Run().to("step")
    twin = pickle.loads(pickle.dumps(run.engine))
    assert twin.dataset is None and twin.stream._key != run.engine.stream._key
    assert twin.accountant.history == run.engine.accountant.history
    assert twin.get_epsilon(1e-3) == run.engine.get_epsilon(1e-3)
