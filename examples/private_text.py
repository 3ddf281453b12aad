"""Fine-tunes a causal language model with LoRA on private text, and looks for what leaked.

    pip install -e '.[transformers]' peft
    python examples/private_text.py
    python examples/private_text.py --not-private

The public text are docstrings of Python's standard library, on which a small Llama of bytes is
trained without privacy. The private text is Python's manual (``pydoc_data.topics``): passages of
one length, each of them a sample. Among them are canaries, random bytes that fair coins put there.
Printed are the perplexity of held-out passages before and after, and a lower bound on ε by the
canaries (``flash_clipping.auditing``). ``--width``, ``--layers`` and ``--length`` make it larger;
``--model`` takes a pretrained causal model of bytes in the place of the small one.

``--synthetic 2000`` samples as many passages from the trained model and judges them: how well a
model of byte n-grams that sees them alone predicts held-out passages, and how much is copied.
"""

from __future__ import annotations

import argparse
import ast
import math
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from canaries import Canaries, loss_scores
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from flash_clipping import per_sample_loss
from flash_clipping.auditing import Audit
from flash_clipping.trainers.transformers import PrivacyArguments, PrivateTrainer

DELTA = 1e-5


def passages(texts: Sequence[str], length: int) -> Tensor:
    """``[M, length]``: bytes of texts, cut into passages; what is left of a text is dropped."""
    rows = []
    for text in texts:
        data = torch.tensor(list(" ".join(text.split()).encode()), dtype=torch.long)
        rows.append(data[: len(data) // length * length].view(-1, length))
    return torch.cat(rows)


def public_texts() -> list[str]:
    """Docstrings of the standard library's modules, classes and functions."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found.append(ast.get_docstring(node) or "")
    return found


def losses(model: nn.Module, batch: Any) -> Tensor:
    """Of every passage, in nats for each byte."""
    (ids,) = batch
    ids = ids.to(next(model.parameters()).device)
    return per_sample_loss(model(input_ids=ids).logits, ids, shift=True)


def perplexity(model: nn.Module, rows: Tensor) -> float:
    """For each byte: 256 for a model that knows nothing."""
    return math.exp(-float(loss_scores(model, TensorDataset(rows), losses).mean()))


def sampled(model: Any, first: Tensor, length: int) -> Tensor:
    """Synthetic passages ``[M, length]``, drawn byte by byte behind first bytes ``[M, 1]``."""
    device, found = next(model.parameters()).device, []
    for prompt in first.to(device).split(100):
        found.append(
            model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                top_k=0,
                min_new_tokens=length - 1,
                max_new_tokens=length - 1,
                use_cache=True,
                pad_token_id=0,
            ).cpu()
        )
    return torch.cat(found)


class NGrams:
    """Bytes behind the ones before them: all orders mixed, by how often and how variously a context
    goes on (Witten and Bell 1991)."""

    def __init__(self, rows: Tensor, order: int = 6) -> None:
        self.order = order
        self.next: defaultdict[bytes, Counter[int]] = defaultdict(Counter)
        for row in map(bytes, rows.tolist()):
            for place, byte in enumerate(row):
                for n in range(min(order, place + 1)):
                    self.next[row[place - n : place]][byte] += 1

    def perplexity(self, rows: Tensor) -> float:
        """Of a byte, 256 for a model that knows nothing."""
        nats = [
            -math.log(self._probability(row[:place], byte))
            for row in map(bytes, rows.tolist())
            for place, byte in enumerate(row)
        ]
        return math.exp(sum(nats) / len(nats))

    def _probability(self, before: bytes, byte: int) -> float:
        found = 1 / 256
        for n in range(min(self.order, len(before) + 1)):
            seen = self.next.get(before[len(before) - n :])
            if seen is None:
                break
            found = (seen[byte] + len(seen) * found) / (seen.total() + len(seen))
        return found


def copied(rows: Tensor, of: Tensor, window: int = 20) -> float:
    """The share of all windows of so many bytes that stand in the other passages as well."""
    known = {tuple(x) for x in of.unfold(1, window, 1).reshape(-1, window).tolist()}
    windows = rows.unfold(1, window, 1).reshape(-1, window).tolist()
    return sum(tuple(x) in known for x in windows) / len(windows)


class Rows(TensorDataset):
    """Passages as the Trainer takes them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        (row,) = super().__getitem__(index)
        return {"input_ids": row, "labels": row}


def base(options: argparse.Namespace) -> Any:
    """A small Llama that has read public text, or the one that was given."""
    if options.model:
        return AutoModelForCausalLM.from_pretrained(options.model)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    rows = passages(public_texts(), options.length)
    Trainer(
        model, arguments(options, options.public_steps, 64, 3e-3), train_dataset=Rows(rows)
    ).train()
    return model


def arguments(
    options: argparse.Namespace, steps: int, batch_size: int, rate: float
) -> TrainingArguments:
    physical = min(batch_size, options.max_physical_batch_size)
    return TrainingArguments(
        output_dir=options.output,
        max_steps=steps,
        per_device_train_batch_size=physical,
        gradient_accumulation_steps=-(-batch_size // physical),
        learning_rate=rate,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=max(1, steps // 5),
        use_cpu=options.device == "cpu",
        bf16=options.device == "cuda",
    )


def main(given: Sequence[str] | None = None) -> tuple[float, float, Audit]:
    """Perplexities before and after, and what the canaries show."""
    options = parse(given)
    set_seed(0)
    model = base(options).to(options.device)

    rows = passages([*topics.values()], options.length)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]
    held_out, private = rows[: options.held_out], rows[options.held_out :]
    public = passages(public_texts(), options.length)
    first = public[torch.randint(len(public), (options.synthetic,)), :1]
    of_base = sampled(model, first, options.length) if options.synthetic else None
    letters = torch.randint(ord("a"), ord("z") + 1, (options.canaries, options.length))
    canaries = Canaries(TensorDataset(letters))  # which nothing but having seen them makes likely
    (canary_rows,) = canaries.samples[:]  # type: ignore[index]
    data = Rows(torch.cat([private, canary_rows[canaries.included_M]]))

    before = perplexity(model, held_out)
    known = loss_scores(model, canaries.samples, losses)
    adapters = LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear",
        exclude_modules=["lm_head"],
    )  # fmt: skip
    model = get_peft_model(model, adapters)
    args = arguments(options, options.steps, options.batch_size, options.rate)
    if options.not_private:
        trainer: Any = Trainer(model, args, train_dataset=data)
    else:
        trainer = PrivateTrainer(
            model,
            args,
            train_dataset=data,
            privacy=PrivacyArguments(
                target_epsilon=options.epsilon,
                target_delta=DELTA,
                max_grad_norm=options.bound,
            ),
        )
    trainer.train()

    after = perplexity(model, held_out)
    found = canaries.audit(
        loss_scores(model, canaries.samples, losses) - known,
        guesses=options.canaries // 2,
        epsilon=math.inf if options.not_private else trainer.epsilon,
        delta=DELTA,
        gaussian=True,
    )
    print(f"\n{len(data):,} passages of {options.length} bytes, {len(held_out)} held out")
    print(f"perplexity of a byte: {before:.2f} before, {after:.2f} after\n\n{found}")
    if of_base is not None:
        texts = sampled(trainer.model.eval(), first, options.length)
        judge(texts, of_base, public, private, held_out, canary_rows[canaries.included_M])
    return before, after, found


def judge(
    texts: Tensor,
    of_base: Tensor,
    public: Tensor,
    private: Tensor,
    held_out: Tensor,
    secret: Tensor,
) -> None:
    """Print what synthetic passages are worth, and whether they are copies."""
    print(f"\n{len(texts):,} synthetic passages, three of them:")
    for row in texts[:3].tolist():
        print("   ", repr(bytes(row).decode(errors="replace")))
    print("\nn-grams of passages: perplexity of a byte of held-out ones")
    count, order = len(texts), torch.randperm(len(public))
    read = {
        "public": public[order[:count]],
        "public, twice as many": public[order[: 2 * count]],
        "public and synthetic": torch.cat([public[order[:count]], texts]),
        "synthetic, before": of_base,
        "synthetic": texts,
        "private": private[:count],
    }
    for name, rows in read.items():
        print(f"    {name:22}{NGrams(rows).perplexity(held_out):6.2f}")
    print("\nwindows of 20 bytes that stand in so many other passages as well")
    pairs = {
        "synthetic in trained": (texts, private),
        "synthetic in held-out": (texts, held_out),
        "held-out in trained": (held_out, private),
        "synthetic in canaries": (texts, secret),
    }
    for name, (rows, of) in pairs.items():
        print(f"    {name:22}{copied(rows, of[: len(held_out)]):7.2%}")


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--not-private", action="store_true", help="for comparison")
    parser.add_argument("--model", help="a folder with a pretrained causal model of bytes")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--length", type=int, default=96, help="bytes of a passage")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--public-steps", type=int, default=400, help="without privacy")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=512, help="expected")
    parser.add_argument("--max-physical-batch-size", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate of AdamW")
    parser.add_argument("--epsilon", type=float, default=8.0, help=f"at delta = {DELTA:g}")
    parser.add_argument("--bound", type=float, default=0.5, help="of a passage's gradient")
    parser.add_argument("--canaries", type=int, default=500)
    parser.add_argument("--held-out", type=int, default=400, help="passages")
    parser.add_argument("--synthetic", type=int, default=0, help="passages to sample and judge")
    parser.add_argument("--output", default="private_text", help="the Trainer's folder")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
