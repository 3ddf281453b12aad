"""The look before a first step, and audits, run on a few samples, shortened where lengths allow."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping._compat import pytree
from flash_clipping.capture.proof import oracle
from flash_clipping.capture.proof.gate import FIRST_AUDIT
from tests.capture.proof.mixers import WRONG, Around, B, K, T
from tests.support.errors import raises

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations returned and that are alive, and the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                self._note(x.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)

        def gone() -> None:
            self._known.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


def bert(length: int) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=200, intermediate_size=64, max_position_embeddings=length, **SMALL
    )
    return transformers.BertForSequenceClassification(config)


def gpt2(length: int) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=200, n_embd=32, n_layer=2, n_head=2, n_positions=length
    )
    return transformers.GPT2LMHeadModel(config)


def vit(length: int) -> nn.Module:
    config = transformers.ViTConfig(
        intermediate_size=64, image_size=length, patch_size=8, num_labels=3, **SMALL
    )
    return transformers.ViTForImageClassification(config)


def given_to(model: nn.Module, count: int, length: int) -> dict[str, Tensor]:
    if isinstance(model, transformers.ViTForImageClassification):
        return {"pixel_values": torch.randn(count, 3, length, length)}
    ids = torch.randint(3, 200, (count, length))
    if isinstance(model, transformers.GPT2LMHeadModel):
        return {"input_ids": ids}
    labels = torch.randint(0, 2, (count,))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def measured_step(
    flash: GradSampleModuleFlashClipping, live: LiveBytes, inputs: dict[str, Tensor]
) -> int:
    """The most bytes alive in a step."""
    gc.collect()
    live.most = live.now
    flash.zero_grad(set_to_none=True)
    flash(**inputs).logits.flatten(1).square().mean(1).mean().backward()
    return live.most


@pytest.mark.parametrize(
    ("make", "count", "length", "positions"),
    [
        (bert, 32, 64, 64),
        (gpt2, 16, 64, 64),
        (vit, 32, 32, 17),
        (gpt2, 4, 256, 64),  # shortened: as many positions as one of the samples has
        (gpt2, 1, 1024, 256),
    ],
)
def test_a_first_step_and_audits_are_small(
    make: Callable[[int], nn.Module], count: int, length: int, positions: int
) -> None:
    """Whatever runs on the batch runs once, and no more bytes are alive than in a later step."""
    torch.manual_seed(0)
    model = make(length)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    sizes: list[tuple[int, int]] = []
    block = next(m for m in model.modules() if isinstance(m, nn.LayerNorm))
    block.register_forward_hook(lambda _, args, __: sizes.append(tuple(args[0].shape[:2])))
    inputs, live, most = given_to(model, count, length), LiveBytes(), {}
    with live:
        for step in ("first", "second", "audit"):
            if step == "audit":
                flash._watch.gate.next_audit = flash._watch.gate.calls + 1
            sizes.clear()
            most[step] = measured_step(flash, live, inputs)
            *looks, _ = sizes
            assert all(rows <= 4 and read <= positions for rows, read in looks), looks
            assert bool(looks) == (step != "second")
            looked_at, whole = sum(a * b for a, b in looks), sizes[-1][0] * sizes[-1][1]
            assert looked_at <= (2 if step == "first" else 1) * whole
    assert most["first"] <= most["second"] and most["audit"] <= most["second"]


def test_the_first_audit_compares_all() -> None:
    """Of what begins in training, two runs alone may show nothing."""
    torch.manual_seed(0)
    begun = False
    mixes = WRONG["features swapped"]
    model = Around(lambda m, h: mixes(m, h) if begun else m.layer(h))
    flash = GradSampleModuleFlashClipping(model, loss_reduction="sum")

    def step() -> None:
        flash.zero_grad()
        flash(torch.randn(B, T, K)).square().sum().backward()

    step()
    begun = True
    flash._watch.gate.calls = FIRST_AUDIT - 1
    with raises("FC210|FC201"):
        step()


class OfWholeTexts(nn.Module):
    """Counts on texts of one length; ``mixes``: takes the mean of the batch off."""

    def __init__(self, length: int, mixes: bool) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 4), nn.Linear(4, 2)
        self.places = nn.Parameter(torch.randn(length, 4))
        self.mixes = mixes

    def forward(self, ids: Tensor, at: Tensor | None = None) -> Tensor:
        h = self.layer(self.table(ids) + (self.places if at is None else 0))
        h = h - h.mean(0) if self.mixes else h
        return h.mean(1) if at is None else h[torch.arange(len(ids)), at]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("points", [False, True])
def test_texts_that_may_not_be_shorter_are_looked_at_whole(count: int, points: bool) -> None:
    """A model of one length; and a place that is behind the cut, which a GPU would not survive."""
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (count, 256))
    given = (ids, torch.full((count,), 255)) if points else (ids,)
    for mixes in (False, True) if count > 1 else (False,):
        flash = GradSampleModuleFlashClipping(OfWholeTexts(256, mixes), loss_reduction="sum")
        output = flash(*given)
        if mixes:
            with raises("FC210", match="outputs of a sample change"):
                output.square().sum().backward()
        else:
            output.square().sum().backward()
            assert flash.get_norm_sample().shape == (count,)


def test_the_part_of_a_text_that_has_labels_is_looked_at() -> None:
    """The beginning has none."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(9, 4), nn.Linear(4, 9)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.layer(self.table(ids)).mT, labels)

    torch.manual_seed(0)
    ids = torch.randint(0, 9, (4, 512))
    labels = torch.where(torch.arange(512) < 400 + 20 * torch.arange(4)[:, None], -100, ids)
    flash = GradSampleModuleFlashClipping(Loss())
    with raises("FC444"):
        flash(ids, labels).backward()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_only_what_any_model_runs_on_is_tried_where_other_processes_wait(is_sharded: bool) -> None:
    flash = GradSampleModuleFlashClipping(OfWholeTexts(256, False))
    flash._session.proof.has_oracle = not is_sharded
    subject = flash._watch.subject(flash._module, (torch.randint(0, 9, (8, 256)),), {})
    shapes = [tuple(small.given()[0][0].shape) for small in subject.smaller()]
    cut = [] if is_sharded else [(4, 64)]
    assert shapes == [*cut, (4, 256), (8, 256)]


def test_kernels_are_compiled_apart_from_what_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are kernels, a backward pass has them compiled. What a recomputation draws in it
    would be other numbers than in the pass that is compared."""

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))

        def forward(self, x: Tensor) -> Tensor:
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            return checkpoint(self.layers, x, **options)

    monkeypatch.setattr(oracle, "compiles_kernels", lambda: True)
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(Recomputed())
    flash(torch.randn(1, 8)).sum().backward()
    assert flash.get_norm_sample().isfinite().all()
