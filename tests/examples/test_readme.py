"""What the README and the pages of docs/ tell people to type works."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flash_clipping
from flash_clipping import FlashPrivacyEngine
from tests.support.hugging_face import gpt2
from tests.support.pages import ROOT, block, sides

README = (ROOT / "README.md").read_text(encoding="utf-8")


MIGRATING = "docs/migrating-from-opacus.md"


def training_objects() -> dict:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "loader": DataLoader(data, batch_size=16),
    }


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_five_lines_train_within_the_budget(page):
    names = training_objects()
    exec(block("tested: five lines", page), names)
    assert 0 < names["engine"].get_epsilon(1e-5) <= 3


def test_the_diff_of_the_front_page_makes_a_script_of_opacus_flash():
    lines = (
        block("tested: a script of Opacus'", "docs/index.md").removeprefix("diff\n").splitlines()
    )
    kept = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    for script, wrapper in ((before, "GradSampleModule"), (kept, "GradSampleModuleFlashClipping")):
        names = training_objects()
        exec(script, names)
        assert type(names["model"]).__name__ == wrapper
        for x, y in names["loader"]:
            names["optimizer"].zero_grad()
            names["criterion"](names["model"](x), y).backward()
            names["optimizer"].step()
        assert names["engine"].get_epsilon(1e-5) > 0


@pytest.mark.usefixtures("randomness_of_opacus")
def test_the_step_to_be_graphed_trains_as_without():
    trained = []
    for graphed in (True, False):
        names = training_objects() | {"nn": nn}
        torch.manual_seed(1)
        names["model"], names["optimizer"], _, names["loader"] = FlashPrivacyEngine().make_private(
            module=names["model"],
            optimizer=names["optimizer"],
            criterion=names["criterion"],
            data_loader=names["loader"],
            noise_multiplier=0.0,
            max_grad_norm=1.0,
        )
        code = block("tested: graphed", "docs/performance.md")
        if not graphed:
            code = code.replace("step = GraphedStep(step, model)\n", "")
        exec(code, names)
        trained.append(torch.cat([p.detach().flatten() for p in names["model"].parameters()]))
    assert torch.equal(*trained)


def test_a_mixture_of_experts_is_trained():
    names: dict = {}
    exec(block("tested: a mixture of experts", "docs/mixture-of-experts.md"), names)
    trained = [p for p in names["model"].parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)


def test_product_keys_train():
    names = {}
    exec(block("tested: product keys", "docs/product-key-router.md"), names)
    norms = names["model"].get_norm_sample()
    assert norms.shape == (4,) and norms.isfinite().all() and (norms > 0).all()


@pytest.mark.parametrize("marker", ["units", "views", "without the engine", "packed", "pairs"])
def test_the_page_on_privacy_units(marker):
    names = training_objects() | {
        name: getattr(flash_clipping, name) for name in flash_clipping.__all__
    }
    names |= {"torch": torch, "DataLoader": DataLoader, "user_of_row": torch.arange(64) % 20}
    if marker == "views":
        data = TensorDataset(torch.randn(64, 2, 4), torch.randint(0, 3, (64,)))
        names["loader"] = DataLoader(data, batch_size=16)
    if marker == "without the engine":
        names |= {"x": torch.randn(5, 4), "y": torch.arange(5) % 3}
        names |= {"user": torch.tensor([0, 1, 0, 2, -1])}
        names["criterion"] = nn.CrossEntropyLoss(reduction="none")
    if marker == "packed":
        names |= {"model": gpt2().float(), "dataset": [torch.arange(2 + n % 4) for n in range(16)]}
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    if marker == "pairs":
        ids = torch.randint(17, (6, 8))
        names |= {"model": gpt2().float(), "P": 3, "input_ids": ids, "labels": ids}
        names["frozen"] = torch.randn(6)
    code = block(f"tested: {marker}", "docs/units.md")
    # A step that adds noise leaves nothing of norms: they are asked for before it.
    last = "optimizer.step()" if "optimizer.step()" in code else "private.get_norm_sample()"
    model = "model" if last == "optimizer.step()" else "private"
    exec(code.replace(last, f"norms = {model}.get_norm_sample(); {last}"), names)
    assert torch.isfinite(names["norms"]).all()
    assert marker not in ("without the engine", "pairs") or len(names["norms"]) == 3


def test_the_block_about_streams():
    names = {"DataLoader": DataLoader, "sizes": [20, 30]}
    names["shards"] = [torch.randn(20, 4), torch.randn(30, 4)]
    exec(block("tested: streams", "docs/sampling.md"), names)
    assert len(names["dataset"]) == 50 and sum(len(x) for x in names["loader"]) == 50


def test_the_lines_that_help_with_a_models_own_loss():
    ids = torch.randint(17, (3, 8))
    model = flash_clipping.GradSampleModuleFlashClipping(gpt2())
    names = {"flash_clipping": flash_clipping, "model": model}
    names["batch"] = {"input_ids": ids, "labels": ids}
    exec(block("tested: own tokens", "docs/peft.md"), names)
    assert model.get_norm_sample().shape == (3,)


@pytest.mark.usefixtures("randomness_of_opacus")
def test_a_migrated_script_trains_the_same_model():
    trained, spent = [], []
    for script in sides("tested: diff of Opacus", MIGRATING):
        names = training_objects()
        torch.manual_seed(1)
        exec(script, names)
        plain = names["model"].to_standard_module()
        trained.append(torch.cat([p.detach().flatten() for p in plain.parameters()]))
        spent.append(names["epsilon"])
    torch.testing.assert_close(*trained, atol=1e-5, rtol=0)
    assert spent[0] == spent[1] > 0


@pytest.mark.parametrize("marker", ["physical batches", "micro-batches"])
def test_batches_in_parts(marker):
    names = training_objects()
    exec(sides("tested: diff of Opacus", MIGRATING)[1], names)
    before = [p.detach().clone() for p in names["model"].parameters()]
    steps = names["engine"].accountant.history[0][2]
    exec(block(f"tested: {marker}", MIGRATING), names)
    assert names["engine"].accountant.history[0][2] == steps + len(names["loader"])
    after = names["model"].parameters()
    assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_the_reference_has_every_public_name():
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")]
    listed = re.findall(r"^::: flash_clipping\.(.+)$", "\n".join(pages), re.MULTILINE)
    assert {*flash_clipping.__all__} <= {*listed} and len({*listed}) == len(listed)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize(
    "target", sorted(set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README))), ids=str
)
def test_link_leads_somewhere(target):
    assert (ROOT / target).exists()


def test_commands_install_the_pinned_versions():
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2
    assert all("pip install -c constraints.txt -e " in command for command in commands)
    assert "examples/digits.py" in commands[0] and "pytest" in commands[1]
    assert block("ci:test").strip() == commands[1]
