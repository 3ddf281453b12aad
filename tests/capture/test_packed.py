"""Documents packed end to end: units that are parts of rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import Documents, GradSampleModuleFlashClipping, Offsets
from flash_clipping.layers import (
    HyperConnections,
    MixtureOfExperts,
    ProductKeyExperts,
    RoutedExperts,
    TopKRouter,
)
from tests.support.errors import raises
from tests.support.hugging_face import gpt2, llama as small_llama
from tests.support.mixtures import mixture
from tests.support.oracle import Truth, assert_close
from tests.support.packed import (
    LENGTHS,
    VOCABULARY,
    ByOffsets,
    Reader,
    Row,
    documents,
    losses,
    one_row,
    packed,
    truth_of,
)
from tests.support.sums import norm_of
from tests.support.wrapping import MODES

pytestmark = pytest.mark.without_gate


def check(
    model: nn.Module, rows: list[Row], padding: int = 2, steps: int = 1, **options: Any
) -> Any:
    truth = truth_of(copy.deepcopy(model), rows)
    bound = truth.norms.median().item()
    flash = GradSampleModuleFlashClipping(
        model, max_grad_norm=bound, unit=Documents("document"), loss_reduction="sum", **options
    )
    ids, places, numbers = packed(rows, padding)
    for _ in range(steps):
        flash.zero_grad(set_to_none=True)
        (losses(flash(ids, places, numbers)) * (numbers >= 0)).sum().backward()
        compare(flash, model, truth, bound)
    return flash


def compare(flash: Any, model: nn.Module, truth: Truth, bound: float, tol: float = 1e-9) -> None:
    assert_close(flash.get_norm_sample(), truth.norms, tol, "norms")
    for name, expected in truth.clipped(bound).items():
        param = model.get_parameter(name)
        assert_close(norm_of(flash, param), truth.param_norms[name], tol, f"norms of {name}")
        assert_close(param.grad, expected, 10 * tol, f"sum of {name}")


# -- exact -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_documents_of_one_row(mode: str) -> None:
    check(Reader().double(), [list(enumerate(documents()))], mode=mode, steps=2)


def test_gradients_that_are_stored() -> None:
    """By shapes: 15 positions, 4 documents; layers of 6 to 18, 6 and 4 features, whose operands
    are read by one layer each."""
    flash = check(Reader().double(), [list(enumerate(documents()))])
    names = {id(param): name for name, param in flash._module.named_parameters()}
    (plan,) = [plan for _, plan in flash._session.calls.plans._plans.values()]
    of_documents = {names[key] for key in plan.others}
    assert of_documents == {"table.weight", "places.weight", "qkv.weight"}


def test_documents_of_several_rows() -> None:
    """And a unit with documents in two rows, between those of others."""
    a, b, c, d, e = documents((3, 4, 1, 2, 5))
    check(Reader().double(), [[(2, a), (0, b)], [(1, c), (2, d), (3, e)]])


@pytest.mark.parametrize("lengths", [(4,), (1, 1, 1), (1, 7)])
def test_lengths(lengths: tuple[int, ...]) -> None:
    check(Reader().double(), [list(enumerate(documents(lengths)))])


class Streams(nn.Module):
    """A linear layer between hyper-connections."""

    def __init__(self) -> None:
        super().__init__()
        self.connections, self.inner = HyperConnections(6, 2), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        streams = x.unsqueeze(2).expand(-1, -1, 2, -1)
        h, post, comb = self.connections(streams)
        mixed: Tensor = self.connections.combine(streams, self.inner(h), post, comb)
        return mixed.sum(2)


BETWEEN = {
    "mixture": lambda: RoutedExperts(TopKRouter(6, 4, 2), MixtureOfExperts(6, 5, 4)),
    "product keys": lambda: ProductKeyExperts(6, 9, 2, shared=4),
    "hyper-connections": Streams,
}


@pytest.mark.parametrize("between", BETWEEN)
def test_layers_of_our_own(between: str) -> None:
    model = Reader(BETWEEN[between]()).double()
    for param in model.between.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.5)
    check(model, [list(enumerate(documents()))])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    model = Reader().double()
    plain = copy.deepcopy(model)
    model.checkpoints = reentrant
    rows: list[Row] = [list(enumerate(documents()))]
    truth = truth_of(plain, rows)
    flash = GradSampleModuleFlashClipping(model, unit=Documents("document"), loss_reduction="sum")
    ids, places, numbers = packed(rows)
    losses(flash(ids, places, numbers)).sum().backward()
    compare(flash, model, truth, 1.0)


class FrozenBody(Reader):
    """Nothing before attention is trainable, or makes what is not finite finite."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.table, self.places, self.qkv):
            layer.requires_grad_(False)

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Overflows(Reader):
    """One token becomes infinite within a checkpoint, whose first forward is not recorded."""

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().attend(torch.where(x[..., :1] > 50, torch.inf, x), mask)


@pytest.mark.parametrize("where", ["loss", "table", "checkpoint", "frozen table", "head"])
def test_a_document_that_is_not_finite(where: str) -> None:
    """It adds nothing, and attention does not carry it to others of its row (0 · inf is NaN)."""
    kinds = {"frozen table": FrozenBody, "checkpoint": Overflows}
    model = kinds.get(where, Reader)().double()
    own = documents()
    own[1][2] = VOCABULARY - 1  # a token that no other document has
    for document in (own[0], own[2], own[3]):
        document.clamp_(max=VOCABULARY - 2)
    rows: list[Row] = [list(enumerate(own))]
    if "table" in where:
        model.table.weight.data[-1] = torch.inf
    if where == "checkpoint":
        model.table.weight.data[-1] = 100.0
    if where == "head":
        model.out.requires_grad_(False)  # gradients pass it on their way
    truth = truth_of(copy.deepcopy(model), rows)
    if where == "checkpoint":
        model.checkpoints = True
    flash = GradSampleModuleFlashClipping(model, unit=Documents("document"), loss_reduction="sum")
    ids, places, numbers = packed(rows)
    bad = torch.inf if where in ("loss", "head") else 1.0
    weight = torch.where(numbers == 1, bad, 1.0).double()
    (losses(flash(ids, places, numbers)) * weight).sum().backward()
    coef, others = flash.get_clipping_coef(), [0, 2, 3]
    assert torch.isfinite(coef).all() and (coef[others] > 0).all()
    assert_close(flash.get_norm_sample()[others], truth.norms[others], 1e-9)
    assert coef[1] == 0
    for name, grads in truth.grads.items():
        param = model.get_parameter(name)
        if param.requires_grad:
            expected = torch.einsum("u,u...->...", coef[others], grads[others])
            assert_close(param.grad, expected, 1e-8, name)


@pytest.mark.parametrize("flat", [False, True])
def test_offsets(flat: bool) -> None:
    model = ByOffsets().double()
    plain = Reader().double()
    plain.load_state_dict(model.state_dict())
    rows: list[Row] = [list(enumerate(documents()))]
    truth = truth_of(plain, rows)
    flash = GradSampleModuleFlashClipping(
        model, unit=Documents(Offsets("starts")), loss_reduction="sum", max_grad_norm=3.0
    )
    ids, places, _ = packed(rows, padding=2)
    starts = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0)
    inputs = (ids[0], places[0]) if flat else (ids, places)
    output = losses(flash(*inputs, starts=starts)).flatten()[: sum(LENGTHS)]
    output.sum().backward()
    compare(flash, model, truth, 3.0)


# -- models of transformers ------------------------------------------------------------------------


def llama() -> nn.Module:
    return small_llama(vocab_size=VOCABULARY, attn_implementation="sdpa", use_cache=True)


def token_losses(logits: Tensor, ids: Tensor, numbers: Tensor) -> Tensor:
    """The last token of a document predicts nothing: its successor is another's."""
    of_one = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] >= 0)
    found = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
    return found * of_one


MODELS = {"llama": llama, "gpt2": gpt2, "mixtral": lambda: mixture("Mixtral")}


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_padded(name: str) -> None:
    """Norms and sums of documents in one row are those of a row for each, padded."""
    found = []
    ids, places, numbers = one_row()
    own = documents()
    padded_ids = nn.utils.rnn.pad_sequence(own, batch_first=True)
    inside = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    for is_packed in (True, False):
        model: Any = MODELS[name]()  # type: ignore[no-untyped-call]
        options = {"unit": Documents("document")} if is_packed else {}
        flash = GradSampleModuleFlashClipping(
            model, max_grad_norm=1.0, loss_reduction="sum", **options
        )
        if is_packed:
            output = flash(
                input_ids=ids, position_ids=places, document=numbers, use_cache=False
            ).logits
            loss = token_losses(output, ids, numbers).sum()
        else:
            output = flash(input_ids=padded_ids, attention_mask=inside.long(), use_cache=False)
            loss = token_losses(output.logits, padded_ids, torch.where(inside, 0, -1)).sum()
        loss.backward()
        sums = {n: p.grad for n, p in model.named_parameters()}
        found.append((flash.get_norm_sample(), sums))
    assert_close(found[0][0], found[1][0], 1e-9 if name != "mixtral" else 1e-6, "norms")
    for param, expected in found[1][1].items():
        scale = 1e-8 if name != "mixtral" else 1e-5
        torch.testing.assert_close(found[0][1][param], expected, atol=scale, rtol=scale)


def test_attention_across_documents_is_refused() -> None:
    """A causal model whose positions do not begin anew."""
    flash = GradSampleModuleFlashClipping(llama(), unit=Documents("document"), loss_reduction="sum")
    ids, places, numbers = one_row()
    with raises("FC277", match="o_proj"):
        flash(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1])[None],
            document=numbers,
            use_cache=False,
        )
    # The same with a mask, which keeps transformers from looking at positions.
    with raises("FC277"):
        flash(
            input_ids=ids,
            position_ids=places,
            attention_mask=torch.ones_like(ids),
            document=numbers,
            use_cache=False,
        )


def test_another_kind_of_call_is_looked_at_anew() -> None:
    flash = GradSampleModuleFlashClipping(llama(), unit=Documents("document"), loss_reduction="sum")
    ids, places, numbers = one_row()
    flash(input_ids=ids, position_ids=places, document=numbers, use_cache=False)
    with raises("FC277"):
        flash(input_ids=ids, document=numbers, use_cache=False)


def test_positions_that_a_model_makes() -> None:
    flash = GradSampleModuleFlashClipping(gpt2(), unit=Documents("document"), loss_reduction="sum")
    ids, _, numbers = one_row((3, 4), padding=0)
    with raises("FC278", match=r"wpe \(Embedding\).*\n +position_ids"):
        flash(input_ids=ids, document=numbers, use_cache=False)
