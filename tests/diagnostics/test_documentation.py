"""The documentation: its rule works, its links lead somewhere, the tests it names exist."""

from __future__ import annotations

import ast
import builtins
import pickle
import re
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
from torch import distributed as dist, nn
from torch.utils.data import DataLoader, TensorDataset

import flash_clipping
from flash_clipping import (
    FlashClippingError,
    GradSampleModuleFlashClipping,
    Rule,
    SeededNoiseWarning,
    codes,
)
from flash_clipping.__main__ import main
from flash_clipping.diagnostics import check
from flash_clipping.ops.error_bounds import ETA
from tests.diagnostics.test_prose import DIALECT
from tests.support.errors import raises
from tests.support.models import Wrapped
from tests.support.pages import ROOT, block

# -- a rule of one's own, as docs/layers.md shows it ----------------------------------------------


def test_the_rule_in_the_documentation_works(own_rules: None) -> None:
    namespace: dict[str, object] = {}
    exec(block("tested: a rule of one's own", "docs/layers.md"), namespace)  # noqa: S102
    layer_type, rule_type = namespace["LowRankLinear"], namespace["LowRankLinearRule"]
    assert issubclass(rule_type, Rule)
    model = Wrapped(nn.Linear(5, 8), layer_type(8, 6, rank=2), nn.Linear(6, 3))
    report = check(model, torch.randn(4, 7, 5), dtype=torch.float64)
    assert report.passed, str(report)
    served = {p.rule for p in report.parameters if p.layer_type == "LowRankLinear"}
    assert served == {"LowRankLinearRule"}


# -- the documentation ----------------------------------------------------------------------------


PACKAGE = ROOT / "flash_clipping"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), codes.PAGE]
FOLDERS = ("flash_clipping", "tests", "benchmarks", "examples", "docs", ".ci")
FILES = [
    str(path.relative_to(ROOT))
    for path in chain(ROOT.iterdir(), *((ROOT / folder).rglob("*") for folder in FOLDERS))
    if path.is_file()
]


def anchors(page: Path) -> set[str]:
    """The anchors that a Markdown renderer makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_the_documentation_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


#: Of users, in examples on the pages.
OF_USERS = {"train.py"}

ALL_PAGES = [
    *PAGES,
    *sorted((ROOT / "docs").glob("*/*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", ALL_PAGES, ids=page_id)
def test_files_and_tests_that_are_named_in_the_documentation_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    suffixes = "py|json|md|ipynb|svg|txt|cfg|toml|yml"
    named = re.findall(rf"`((?:[\w.-]+/)*[\w.-]+\.(?:{suffixes})|tests/[\w/]+)(?:::(\w+))?`", text)
    for file, test in {*named} - {(name, "") for name in OF_USERS}:
        found = [at for at in FILES if f"/{at}".endswith(f"/{file.rstrip('/')}")]
        assert found or (ROOT / file).is_dir(), file
        sources = (
            at for at in found if re.search(rf"(def|class) {test}\b", (ROOT / at).read_text())
        )
        assert not test or any(sources), f"{file}::{test}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=page_id)
def test_tables_have_a_heading_and_as_many_cells_in_every_row(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^ *\|.*\n)+", text, flags=re.MULTILINE):
        heading, *rows = (re.split(r"(?<!\\)\|", line) for line in table.splitlines())
        assert rows and all(re.fullmatch(r" *:?-+:? *", cell) for cell in rows[0][1:-1]), table
        assert {len(row) for row in rows} == {len(heading)}, table


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "tutorials").glob("*.md")), ids=page_id)
def test_commands_of_tutorials_write_into_no_tracked_folder(page: Path) -> None:
    written = re.findall(r"--(?:plot|output|json|checkpoint)[ =](\S+)", page.read_text())
    assert [path for path in written if path.split("/")[0] in FOLDERS] == []


def test_pages_promise_epsilon_and_delta_and_no_more() -> None:
    pages = [*ALL_PAGES, *(ROOT / "examples").glob("*.ipynb"), *(ROOT / "examples").glob("*.py")]
    said = [f"{page_id(page)}: {line}" for page in pages for line in page.read_text().splitlines()]
    too_much = "nobody can tell|no one can tell|probability that the promise|shows? in its weights"
    assert [line for line in said if re.search(too_much, line)] == []


def test_the_bound_of_the_front_page_is_the_one_that_is_defined() -> None:
    defined = (ROOT / "docs" / "guarantees.md").read_text()
    readme = " ".join((ROOT / "README.md").read_text().split())
    for part in ("up to 16,384 samples", "3 C"):
        assert part in defined and part in readme, part
    assert "c_b = min(1, C / (n_b + 1e-6))" in readme
    assert r"c_b = \min\left(1, \frac{C}{n_b + 10^{-6}}\right)" in defined
    assert f"η = {ETA}" in defined and f"{1 + ETA} C" in readme
    assert "the returned criterion, or a *sum*" in readme


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_idea_of_the_architecture_clips_as_the_library_does() -> None:
    block = ARCHITECTURE.split("<!-- tested: the idea -->")[1].split("```")[1]
    namespace: dict[str, Any] = {}
    exec(block.removeprefix("python\n"), namespace)  # noqa: S102
    record: list[Any] = []
    layers = [nn.Linear(5, 4, bias=False).double(), nn.Linear(4, 3, bias=False).double()]
    x = torch.randn(6, 7, 5, dtype=torch.float64) * torch.arange(6).view(6, 1, 1)

    def losses(*calls: Any) -> Any:
        return calls[1](calls[0](x).tanh()).square().sum((1, 2))

    taps = [lambda x, w=layer.weight: namespace["Tapped"].apply(record, x, w) for layer in layers]
    losses(*taps).sum().backward()
    found = [layer.weight.grad for layer in layers]
    flash = GradSampleModuleFlashClipping(nn.Sequential(layers[0], nn.Tanh(), layers[1]))
    flash.zero_grad(set_to_none=True)
    flash(x).square().sum((1, 2)).mean().backward()
    coef = flash.get_clipping_coef()
    assert coef.min() < 0.9 and coef.max() == 1 and record == []
    for layer, grad in zip(layers, found, strict=True):
        torch.testing.assert_close(grad, layer.weight.grad, rtol=1e-5, atol=0)


def test_names_in_the_architecture_exist(messages: Messages) -> None:
    files = [
        str(path.relative_to(ROOT)) for path in [*PACKAGE.rglob("*.py"), *ROOT.glob("tests/*")]
    ]
    named = set(re.findall(r"`([\w/]+\.py)`|^ +([\w/]+\.py) ", ARCHITECTURE, re.MULTILINE))
    paths = {path for path in chain(*named) if path}
    assert len(paths) > 70
    for path in paths:
        assert any(f"/{file}".endswith(f"/{path}") for file in files), path
    names = set(re.findall(r"`(_?[A-Z]\w*[a-z]\w*(?:\.\w+)?)`", ARCHITECTURE))
    names -= {"DTensor"}  # PyTorch's
    assert len(names) > 25
    for name in names:
        assert messages.defined.keys() >= {*name.split(".")}, name


# -- errors and warnings by their codes, flash_clipping/troubleshooting.md -----------------------

#: Where the text is, among the arguments of what is no class of errors.
SAID = {"warnings.warn": 0, "check_on_device": 1}

#: They never leave the library, or Python itself reads them.
INNER = {"ReadsNoSamples", "UsesOthers", "_NotFinite", "ModelsOwnError", "AssertionError"}
INNER |= {"NoComparison", "AttributeError", "IndexError", "ImportError", "KeyError", "RuntimeError"}

#: Errors that are told again, and texts that were made elsewhere: their codes come with them.
HANDED_ON = {
    "FlashClippingError(f'{error.args[0]}{where}')",
    "NotServed(f'{path}: {error}')",
    "NotServed('it may compute something else of a sample without the others')",
    "UnsupportedLayer(str(error))",
}


class Messages:
    """The errors and warnings of a package, and the codes that its texts begin with."""

    def __init__(self, package: Path):
        self.trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
        self.defined: dict[str, list[ast.AST]] = {}
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    self.defined.setdefault(node.name, []).append(node)

    @cached_property
    def codes(self) -> set[str]:
        nodes = chain(*map(ast.walk, self.trees.values()))
        texts = (node.value for node in nodes if isinstance(node, ast.Constant))
        found = (re.match(r"(FC\d{3}) ?", text) for text in texts if isinstance(text, str))
        return {code[1] for code in found if code}

    def texts(self) -> list[str]:
        """Messages as they are written, with what is put in left out."""
        nodes = chain(*map(ast.walk, self.trees.values()))
        parts = (n.values if isinstance(n, ast.JoinedStr) else [n] for n in nodes)
        strings = ([p.value for p in of if isinstance(p, ast.Constant)] for of in parts)
        texts = ("".join(p for p in of if isinstance(p, str)) for of in strings)
        return [text for text in texts if re.match(r"FC\d{3} ", text)]

    def uncoded(self) -> list[str]:
        """Every place where an error or a warning is made of a text that begins with no code."""
        found = []
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                kind = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if not isinstance(node, ast.Call) or not (kind in SAID or self._is_error(kind)):
                    continue
                text = node.args[SAID.get(kind, 0) :][:1]
                if not text or kind in INNER or ast.unparse(node) in HANDED_ON:
                    continue
                if self._begins(text[0]) not in (None, True):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
        return found

    def _begins(self, text: ast.expr) -> bool | None:
        """Whether this begins with a code; ``None`` of what is made elsewhere."""
        match text:
            case ast.BinOp(left=left):
                return self._begins(left)
            case ast.Call(func=ast.Attribute(value=value)):
                return self._begins(value)
            case ast.JoinedStr(values=[first, *_]):
                return isinstance(first, ast.Constant) and self._begins(first)
            case ast.Constant(value=str(said)):
                return re.match(r"FC\d{3} ", said) is not None
        return None

    def _is_error(self, name: str) -> bool:
        made = getattr(builtins, name, None)
        if isinstance(made, type):
            return issubclass(made, Exception)
        defined = [n for n in self.defined.get(name, []) if isinstance(n, ast.ClassDef)]
        return any(self._is_error(ast.unparse(base)) for n in defined for base in n.bases)


@pytest.fixture(scope="module")
def messages() -> Messages:
    return Messages(PACKAGE)


class Gated(nn.Module):
    """``block.gate`` is refused, if it is trained, where its weight is a part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.BatchNorm1d(3), nn.ModuleDict({"gate": nn.Linear(3, 3)})
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x) * self.block["gate"].bias)


def test_the_lines_on_the_page_of_errors_work(tmp_path: Path) -> None:
    page = codes.PAGE.read_text()
    fix, freeze, unwrap, expand, load, ordinary, losses, parallel = re.findall(
        r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {"torch": torch, "opacus": opacus, "flash_clipping": flash_clipping}
    names |= {"DataLoader": DataLoader, "batch_size": 4, "model": Gated()}
    x = torch.randn(4, 3, requires_grad=True)

    def backward() -> None:
        gate = getattr(names["model"], "module", names["model"]).block["gate"]
        names["model"] = GradSampleModuleFlashClipping(names["model"])
        penalty = gate.weight.square().sum()
        (names["model"](x).square().sum(1).mean() + penalty).backward()

    with raises("FC101", NotImplementedError):
        backward()
    exec(fix, names)  # noqa: S102
    with raises("FC142"):
        backward()
    names["model"] = names["model"].to_standard_module()
    exec(freeze, names)  # noqa: S102
    backward()
    names["x"] = x
    exec(ordinary, names)  # noqa: S102
    assert names["grads"][0].shape == x.shape and names["model"].get_norm_sample().shape == (4,)
    exec(unwrap, names)  # noqa: S102
    assert type(names["plain"]) is Gated
    names["x"] = torch.randn(1, 3)
    exec(expand, names)  # noqa: S102
    assert names["x"].shape == (4, 3)
    names |= {"output": torch.randn(4, 2), "labels": torch.tensor([0, 1, 1, 0])}
    exec(losses, names)  # noqa: S102
    expected = nn.functional.cross_entropy(names["output"], names["labels"])
    torch.testing.assert_close(names["loss"], expected)
    names["dataset"] = TensorDataset(torch.randn(300, 3))
    exec(load, names)  # noqa: S102
    assert len(names["loader"]) == 2
    names["model"] = names["plain"]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/at", rank=0, world_size=1)
    try:
        exec(parallel, names)  # noqa: S102
        backward()
    finally:
        dist.destroy_process_group()


def test_every_error_has_a_class_of_the_library(messages: Messages) -> None:
    """Those of Python's own classes would name no page."""
    calls = [
        n for tree in messages.trees.values() for n in ast.walk(tree) if isinstance(n, ast.Call)
    ]
    kinds = {ast.unparse(call.func) for call in calls}
    assert not kinds & {"ValueError", "TypeError", "NotImplementedError"}


def test_every_error_and_warning_begins_with_a_code(messages: Messages) -> None:
    assert messages.uncoded() == []


def test_every_code_has_one_entry_and_every_entry_a_code(messages: Messages) -> None:
    entries = [entry.code for entry in codes.entries()]
    assert len(entries) == len({*entries}) > 200 and entries == sorted(entries)
    assert {*entries} == messages.codes
    assert codes.PAGE.read_text().count("**FC") == len(entries)


def test_messages_are_in_the_words_of_the_field(messages: Messages) -> None:
    found = [
        f"{word}: {text}"
        for text in messages.texts()
        for word in DIALECT
        if re.search(rf"\b(?:{word})\b", text)
    ]
    assert not found, "\n".join(found)


def test_the_command_explains_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["errors", "fc101"]) == 0
    title, _, heading, _, text = capsys.readouterr().out.split("\n", maxsplit=4)
    assert title.startswith("FC101 the layer mixes samples") and "mixes samples" in heading
    assert "\n    model = opacus.validators.ModuleValidator.fix(model)\n" in text
    assert "](" not in text and "(docs/sharp-edges.md#" in text
    assert main(["errors"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(codes.entries())
    assert main(["errors", "FC1011"]) == 2
    assert "Did you mean FC" in capsys.readouterr().err


def test_an_error_and_a_warning_know_their_codes() -> None:
    for error in (
        FlashClippingError("FC101 conv: it mixes samples."),
        FlashClippingError("conv: FC101 it mixes samples."),
        pickle.loads(pickle.dumps(FlashClippingError("FC101 conv: it mixes samples."))),
    ):
        assert error.code == "FC101" and str(error).startswith("FC101 conv: it mixes")
        assert "flash-clipping errors FC101" in error.__notes__[0]
    assert SeededNoiseWarning("FC570 a seed").code == "FC570"
    assert FlashClippingError().code == "" == FlashClippingError("of a user's rule").code
