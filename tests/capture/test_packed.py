"""Documents packed end to end are units that are parts of rows: exact, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import Documents, GradSampleModuleFlashClipping, Offsets, samples
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
    Scale,
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


def test_documents_of_several_rows() -> None:
    """And a unit with documents in two rows, between those of others."""
    a, b, c, d, e = documents((3, 4, 1, 2, 5))
    check(Reader().double(), [[(2, a), (0, b)], [(1, c), (2, d), (3, e)]])


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


def test_positions_that_a_model_makes() -> None:
    flash = GradSampleModuleFlashClipping(gpt2(), unit=Documents("document"), loss_reduction="sum")
    ids, _, numbers = one_row((3, 4), padding=0)
    with raises("FC278", match=r"wpe \(Embedding\).*\n +position_ids"):
        flash(input_ids=ids, document=numbers, use_cache=False)


def attention(x: Tensor, document: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, document[:, :, None] == document[:, None])


class Root(Scale):
    """Its gradient is infinite where something large is read, its output is not."""

    def forward(self, x: Tensor) -> Tensor:
        is_large = x.abs().amax(-1, keepdim=True) > 20
        root = torch.where(is_large, x - x.detach(), 1.0).sqrt()
        return self.gain * torch.where(is_large, root, x)


class Mixing(Scale):
    """Mixes positions itself, as a frozen module may."""

    document: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return attention(self.gain * x, self.document)


class Between(nn.Module):
    """A module, attention, another module; one token becomes infinite, or large, in front."""

    def __init__(self, before: nn.Module, after: nn.Module, value: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.before, self.after = nn.Embedding(VOCABULARY, 6), before, after
        self.table.weight.data[-1] = 100.0
        self.value = value

    def forward(self, ids: Tensor, places: Tensor, document: Tensor) -> Tensor:
        if isinstance(self.after, Mixing):
            self.after.document = document
        x = self.table(ids) + torch.linspace(0, 1, 6) * places.unsqueeze(-1)
        x = self.before(torch.where(x[..., :1] > 50, self.value, x))
        output: Tensor = self.after(attention(x, document))
        return output


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def linear() -> nn.Module:
    return nn.Linear(6, 6)


CASES: dict[str, tuple[Callable[[], Between], float]] = {
    "output of a layer": (lambda: Between(linear(), linear(), torch.inf), 1.0),
    "gradient of a layer": (lambda: Between(linear(), linear(), 100.0), torch.inf),
    "output of a module": (lambda: Between(Scale(6), linear(), torch.inf), 1.0),
    "gradient of a module": (lambda: Between(linear(), Scale(6), 100.0), torch.inf),
    "output of a frozen module": (lambda: Between(frozen(Scale(6)), linear(), torch.inf), 1.0),
    "gradient into a frozen module": (lambda: Between(linear(), frozen(Mixing(6)), 1.0), torch.inf),
    "gradient of a frozen module": (lambda: Between(linear(), frozen(Root(6)), 100.0), 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_it_reaches_no_other(name: str) -> None:
    make, weight = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    own = [document.clamp(max=VOCABULARY - 2) for document in documents()]
    own[1][2] = VOCABULARY - 1
    rows: list[Row] = [list(enumerate(own))]
    truth = truth_of(copy.deepcopy(model), rows)
    flash = GradSampleModuleFlashClipping(model, unit=Documents("document"), loss_reduction="sum")
    ids, places, numbers = packed(rows, padding=1)
    weights = torch.where(numbers == 1, weight, 1.0) * (numbers >= 0)
    (losses(flash(ids, places, numbers)) * weights).sum().backward()
    coef, others = flash.get_clipping_coef(), [0, 2, 3]
    assert coef[1] == 0
    assert_close(flash.get_norm_sample()[others], truth.norms[others], 1e-9)
    assert torch.isfinite(model.table.weight.grad).all()


# -- documents that reach each other ---------------------------------------------------------------


class ToEverybody(Reader):
    def mask(self, document: Tensor) -> Tensor:
        return torch.ones_like(super().mask(document))


class Causal(Reader):
    def mask(self, document: Tensor) -> Tensor:
        return torch.ones_like(super().mask(document)).tril()


class FirstToLast(Reader):
    """The last document reads the first, and nothing else is wrong."""

    def mask(self, document: Tensor) -> Tensor:
        last = document.amax(1)[:, None, None]
        return super().mask(document) | (document[:, :, None] == last) & (document[:, None] == 0)


@pytest.mark.parametrize("pair", [(1, 3), (2, 0), (4, 2)], ids=str)
def test_of_any_two_documents_none_may_read_the_other(pair: tuple[int, int]) -> None:
    """Both may be changed, or kept, by one run that changes several."""

    class Leaks(Reader):
        def mask(self, document: Tensor) -> Tensor:
            reads, read = pair
            return super().mask(document) | (
                (document[:, :, None] == reads) & (document[:, None] == read)
            )

    flash = GradSampleModuleFlashClipping(Leaks(), unit=Documents("document"))
    with raises("FC277", match=r"out \(Linear\)"):
        flash(*one_row((3, 2, 1, 4, 2, 3)))


class NextToken(nn.Module):
    """Reads the position behind, across documents."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-3 * x.roll(-1, 1)


class OverPositions(nn.Module):
    """A module of its own that normalizes over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x - x.mean(1, keepdim=True))


@pytest.mark.parametrize("kind", [ToEverybody, Causal, FirstToLast])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_that_reaches_others(kind: Any, dtype: torch.dtype) -> None:
    flash = GradSampleModuleFlashClipping(kind().to(dtype), unit=Documents("document"))
    with raises("FC277", match=r"out \(Linear\)"):
        flash(*one_row())


def test_a_layer_between_that_reaches_others() -> None:
    between = nn.Sequential(NextToken(), nn.Linear(6, 6))
    flash = GradSampleModuleFlashClipping(Reader(between), unit=Documents("document"))
    with raises("FC277", match=r"between.1 \(Linear\)"):
        flash(*one_row())


def test_several_documents_come_later() -> None:
    """With one alone nothing can be seen, and nothing is concluded."""
    flash = GradSampleModuleFlashClipping(
        Causal(), unit=Documents("document"), loss_reduction="sum"
    )
    flash(*one_row((5,))).sum().backward()
    with raises("FC277"):
        flash(*one_row())


# -- layers that cannot be served ------------------------------------------------------------------


class Transposed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mT).mT


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return found


class Declared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with samples(torch.zeros(len(x), dtype=torch.long), count=len(x)):
            return self.layer(x)


LAYERS = {
    "convolution": (lambda: Transposed(nn.Conv1d(6, 6, 1)), r"layer \(Conv1d\).*by position"),
    "group norm": (lambda: Transposed(nn.GroupNorm(2, 6)), r"layer \(GroupNorm\).*by position"),
    "two axes": (lambda: nn.LayerNorm((15, 6)), r"between \(LayerNorm\).*by position"),
    "attention": (Attends, r"MultiheadAttention.*by position"),
    "own norm": (OverPositions, r"between \(OverPositions\).*by position"),
    "axes": (lambda: Transposed(nn.Linear(15, 15)), r"layer \(Linear\).*expected \[1, 15, ...\]"),
    "samples": (Declared, r"layer \(Linear\).*inside samples"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_are_refused(name: str) -> None:
    make, words = LAYERS[name]
    flash = GradSampleModuleFlashClipping(Reader(make()), unit=Documents("document"))
    with raises("FC278", match=words):
        flash(*one_row())


def test_time_first_is_refused() -> None:
    flash = GradSampleModuleFlashClipping(Reader(), unit=Documents("document"), batch_first=False)
    with raises("FC270", match=r"unit=Documents\('document'\).*batch"):
        flash(*one_row())


def test_a_compiled_model_is_refused() -> None:
    flash = GradSampleModuleFlashClipping(Reader(), unit=Documents("document"))
    flash.compile(backend="eager")
    with raises("FC285"):
        flash(*one_row())


def test_a_mean_is_refused() -> None:
    """Over tokens, it would be shared by all documents; the criterion adds up."""
    flash = GradSampleModuleFlashClipping(Reader(), unit=Documents("document"))
    loss = losses(flash(*one_row())).mean()
    with raises("FC276"):
        loss.backward()
    assert all(p.grad is None for p in flash.parameters())
    tokens = losses(flash(*one_row())).flatten()
    flash.check_losses(tokens)
    with raises("FC241", match="1.*15"):
        flash.check_losses(tokens.sum()[None])


def test_offsets_that_are_wrong() -> None:
    for starts, words in (
        (torch.tensor([0, 3, 2, 13]), "do not begin at 0, fall"),
        (torch.tensor([1, 3, 13]), "do not begin at 0"),
        (torch.tensor([0, 3, 16]), "beyond the 15 positions"),
        (torch.tensor([[0, 3]]), r"expected \[U \+ 1\]"),
        (torch.tensor([0.0, 3.0]), "expected an integer tensor"),
    ):
        flash = GradSampleModuleFlashClipping(ByOffsets(), unit=Documents(Offsets("starts")))
        ids, places, _ = one_row()
        with raises("FC270|FC271", match=words):
            flash(ids, places, starts=starts)
    ids, places, _ = packed([[(0, documents()[0])], [(1, documents()[1])]])
    with raises("FC271", match="batch of 2 rows; expected one"):
        flash(ids, places, starts=torch.tensor([0, 3]))


def test_no_documents() -> None:
    flash = GradSampleModuleFlashClipping(
        Reader(), unit=Documents("document"), loss_reduction="sum"
    )
    empty = torch.zeros(1, 0, dtype=torch.long)
    with raises("FC250"):
        flash(empty, empty, empty)
    flash.expect_samples(0)
    losses(flash(*one_row((4,)))).sum().backward()
    assert flash.get_norm_sample().shape == (0,)
    assert all(not p.grad.any() for p in flash.parameters())
