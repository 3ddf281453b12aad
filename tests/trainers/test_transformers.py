"""``PrivateTrainer``: its steps against one sample at a time, logs, evaluation, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

from flash_clipping import AdaptiveBound
from flash_clipping.trainers.private_run import LogicalBatch
from flash_clipping.trainers.transformers import PrivateSeq2SeqTrainer, PrivateTrainer
from tests.support.errors import raises
from tests.support.trainers import (
    Texts,
    arguments,
    bert,
    privacy,
    trainer,
    weights,
)

BOUND = 0.05
RATE = 0.1
SGD = {"optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant"}


class PlainOptimizer(PrivateTrainer):
    """Fails when training begins, with hooks on the model."""

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        super().create_scheduler(*args, **kwargs)
        raise RuntimeError("not private")


class Recording(PrivateTrainer):
    """Notes which samples every step draws, and in which parts."""

    def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
        pairs = zip(inputs.parts, inputs.sizes, strict=True)
        parts = [part["input_ids"][:size] for part, size in pairs]
        self.__dict__.setdefault("drawn", []).append(parts)
        return super().training_step(model, inputs, *args)


def rows(dataset: Texts, tokens: Tensor) -> list[int]:
    """Which samples these tokens are of."""
    known = [dataset[index]["input_ids"].tolist() for index in range(len(dataset))]
    return [known.index(row) for row in tokens.tolist()]


def clipped_update(model: nn.Module, dataset: Texts, drawn: list[int]) -> dict[str, Tensor]:
    """The sum of clipped gradients, one sample at a time, by plain autograd."""
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for index in drawn:
        sample = {k: v[None] for k, v in dataset[index].items() if k not in ("index", "labels")}
        model.zero_grad()
        F.cross_entropy(model(**sample).logits, dataset[index]["labels"][None]).backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        for name, grad in grads.items():
            sums[name] += grad * (BOUND / (norm + 1e-6)).clamp(max=1)  # as in Opacus
    model.zero_grad()
    return sums


@pytest.mark.parametrize(
    ("settings", "tolerance", "parts_of"),
    [
        ({}, 1e-9, 3),
        ({"dataloader_num_workers": 1}, 1e-9, 3),  # whose batches are announced
        ({"gradient_checkpointing": True}, 1e-9, 6),
        ({"bf16": True}, 2e-2, 6),
    ],
    ids=["parts", "workers", "checkpointing", "bf16"],
)
def test_steps_are_those_of_one_sample_at_a_time(
    tmp_path: Path, settings: dict[str, Any], tolerance: float, parts_of: int
) -> None:
    """Clipped by sample, in parts of any size, divided by the expected batch; nothing else."""
    dtype = torch.float32 if "bf16" in settings else torch.float64
    steps = 4
    if parts_of == 6:
        steps = 2
        settings = settings | {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}
    model, dataset = bert(dtype), Texts(20)
    expected = bert(dtype).train()
    private = trainer(
        tmp_path,
        model,
        cls=Recording,
        of_privacy={"noise_multiplier": 0.0, "max_grad_norm": BOUND},
        num_train_epochs=steps / 4,
        **SGD,
        **settings,
    )
    private.train()
    # Twenty samples, at most six expected in a batch: four steps in an epoch, of five samples.
    assert private.state.global_step == private.run.steps == len(private.drawn) == steps
    sizes = [[len(part) for part in parts] for parts in private.drawn]
    assert all(0 < size <= parts_of for parts in sizes for size in parts)
    for parts in private.drawn:
        drawn = rows(dataset, torch.cat(parts))
        assert len(set(drawn)) == len(drawn)
        sums = clipped_update(expected, dataset, drawn)
        with torch.no_grad():
            for name, param in expected.named_parameters():
                param -= RATE * sums[name] / 5
    start = weights(bert(dtype))
    for name, param in weights(expected).items():
        if param.is_floating_point():
            moved = (param - start[name]).norm()
            assert (model.state_dict()[name] - param).norm() <= tolerance * max(moved, 1e-3)


def test_empty_batches_are_steps(tmp_path: Path) -> None:
    """Noise only, and accounted."""
    model = bert()
    private = trainer(
        tmp_path,
        model,
        cls=Recording,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        num_train_epochs=1,
        **SGD,
        size=12,
    )
    states: list[Tensor] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
            states.append(model.classifier.weight.detach().clone())

    private.add_callback(Watch())
    private.train()
    sizes = [sum(map(len, parts)) for parts in private.drawn]
    assert 0 in sizes
    assert private.run.steps == 12
    changes = [b - a for a, b in zip(states[:-1], states[1:], strict=True)]
    empty = sizes.index(0, 1) - 1
    assert changes[empty].std() == pytest.approx(RATE * BOUND / BOUND, rel=0.5)


def takes_apart(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    labels = torch.stack([sample.pop("labels") for sample in samples])
    return default_data_collator(samples) | {"labels": labels}


def out_of_memory_above(model: nn.Module, most: int) -> list[int]:
    """Let it run out of memory with more samples; the sizes that it was trained with."""
    sizes: list[int] = []

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            sizes.append(len(kwargs["input_ids"]))
            if sizes[-1] > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    model.register_forward_pre_hook(check, with_kwargs=True)
    return sizes


@pytest.mark.parametrize(("most", "workers"), [(1, 0), (2, 1), (3, 0)])
def test_parts_that_run_out_of_memory_are_halved(tmp_path: Path, most: int, workers: int) -> None:
    """The same batches, noise and epsilon as in a run with memory enough; each size tried once."""
    found = []
    for limit in (most, 100):
        model = bert(torch.float64)
        sizes = out_of_memory_above(model, limit)
        private = trainer(
            tmp_path,
            model,
            per_device_train_batch_size=6,
            gradient_accumulation_steps=1,
            num_train_epochs=1,
            auto_find_batch_size=True,
            dataloader_num_workers=workers,
            more={"data_collator": takes_apart},
            **SGD,
        )
        private.train()
        found.append((weights(model), private.run.engine.accountant.history, private.run.steps))
        tried = [size for size in sizes if size > limit]
        assert tried == sorted(set(tried), reverse=True) and bool(tried) == (limit == most)
    for name, tensor in found[0][0].items():
        torch.testing.assert_close(tensor, found[1][0][name], rtol=1e-12, atol=1e-12)
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize(("fits", "workers"), [(100, 1), (6, 0)])
def test_a_draw_that_is_larger_is_tried_whole(tmp_path: Path, fits: int, workers: int) -> None:
    """One part for each draw where that fits; else parts of what was said to fit, in equal sizes,
    from the first that did not. Batches, noise and epsilon are those of a run with a limit."""
    found = []
    for limit in (6, None):
        model = bert(torch.float64)
        sizes = out_of_memory_above(model, 6 if limit else fits)
        private = trainer(
            tmp_path,
            model,
            cls=Recording,
            of_privacy={"max_physical_batch_size": limit},
            size=40,
            per_device_train_batch_size=6,
            gradient_accumulation_steps=1,
            num_train_epochs=1,
            dataloader_num_workers=workers,
            **SGD,
        )
        private.train()
        found.append((weights(model), private.run.engine.accountant.history, private.run.steps))
        large = [size for size in sizes if size > 6]
        parts = [[len(part) for part in parts] for parts in private.drawn]
    draws = [sum(of_draw) for of_draw in parts]
    assert max(draws) > 6  # or nothing is shown
    if fits == 100:
        assert all(len(of_draw) == 1 for of_draw in parts) and large
    else:
        assert large == [next(draw for draw in draws if draw > 6)]
    for name, tensor in found[0][0].items():
        torch.testing.assert_close(tensor, found[1][0][name], rtol=1e-12, atol=1e-12)
    assert found[0][1:] == found[1][1:]


def test_a_larger_part_is_cut_by_its_rows() -> None:
    batch = LogicalBatch([{"x": torch.arange(6), "mode": "a"}, {"x": torch.arange(6, 13)}], [6, 7])
    batch.split(1, 3)
    assert batch.sizes == [6, 3, 2, 2] or batch.sizes == [6, 2, 2, 3] or batch.sizes == [6, 2, 3, 2]
    assert torch.cat([part["x"] for part in batch.parts]).tolist() == [*range(13)]
    folded = LogicalBatch([torch.arange(10)], [5])
    with raises("FC810", ValueError, match="max_physical_batch_size=2"):
        folded.split(0, 3)


def test_out_of_memory_names_the_argument_that_halves(tmp_path: Path) -> None:
    model = bert()
    out_of_memory_above(model, 1)
    with pytest.raises(torch.OutOfMemoryError) as error:
        trainer(tmp_path, model).train()
    (note,) = error.value.__notes__
    assert note.endswith("TrainingArguments(..., auto_find_batch_size=True)")


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    """Weights, optimizer, schedule, epsilon and batches: bitwise, with a seed."""
    straight = bert()
    first = trainer(tmp_path, straight, max_steps=5, save_strategy="steps", save_steps=3)
    first.train()
    folder = tmp_path / "checkpoint-3"
    resumed = bert()
    second = trainer(tmp_path, resumed, max_steps=5)
    second.train(resume_from_checkpoint=str(folder))
    assert second.epsilon == first.epsilon > 0
    assert second.run.steps == second.state.global_step == 5
    for name, tensor in weights(straight).items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
    with raises("FC581", ValueError, match="5"):
        second.train(resume_from_checkpoint=str(folder))

    # What is saved is the model itself.
    assert not any("_module" in name for name in straight.state_dict())
    first.save_model(str(tmp_path / "model"))
    read = BertForSequenceClassification.from_pretrained(tmp_path / "model")
    assert all(torch.equal(read.state_dict()[n], t) for n, t in weights(straight).items())

    # Other runs, and none, are refused.
    for settings, found in (
        ({"of_privacy": {"noise_multiplier": 2.0}}, "noise_multiplier was 1.0, is 2.0"),
        ({"gradient_accumulation_steps": 5}, "sample_rate was 0.25, is 0.5"),
        ({"max_grad_norm": 0.5}, "max_grad_norm was 1.0, is 0.5"),
    ):
        with raises("FC582", ValueError, match=found):
            trainer(tmp_path, **settings).train(resume_from_checkpoint=str(folder))
    state = torch.load(folder / "privacy.pt")
    torch.save(state | {"steps_before": 1}, folder / "privacy.pt")
    with raises("FC584", RuntimeError, match="counts 3 steps, and 2 are accounted"):
        trainer(tmp_path).train(resume_from_checkpoint=str(folder))
    (folder / "privacy.pt").unlink()
    with raises("FC582", ValueError, match=r"no privacy\.pt"):
        trainer(tmp_path).train(resume_from_checkpoint=str(folder))


def test_without_a_seed_a_resumed_run_draws_afresh(tmp_path: Path) -> None:
    """Neither ``TrainingArguments.seed`` nor the checkpoint's generators repeat noise."""
    models = []
    trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=1, **SGD).train()
    for _ in range(2):
        models.append(bert())
        private = trainer(tmp_path, models[-1], of_privacy={"seed": None}, max_steps=2, **SGD)
        private.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert not torch.equal(models[0].classifier.weight, models[1].classifier.weight)


def test_evaluation_is_the_trainers_own(tmp_path: Path) -> None:
    private = trainer(tmp_path, max_steps=1)
    private.train()
    plain = Trainer(model=private.model, args=arguments(tmp_path), eval_dataset=Texts(7)).evaluate()
    assert private.evaluate()["eval_loss"] == plain["eval_loss"]


def test_texts_that_evaluation_generates_are_the_trainers_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=31, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    texts = [{"input_ids": [n % 29 + 1, 5, 1], "labels": [n % 7 + 1, 1]} for n in range(12)]
    given: dict[str, Any] = {"train_dataset": texts, "eval_dataset": texts[:5]}
    args = Seq2SeqTrainingArguments(
        **{**arguments(tmp_path, max_steps=2, learning_rate=0.5).to_dict()}
        | {"predict_with_generate": True, "generation_max_length": 6}
    )
    private = PrivateSeq2SeqTrainer(model, args, **given, privacy=privacy())
    before = private.predict(texts).predictions
    private.train()
    found, plain = (each.predict(texts) for each in (private, Seq2SeqTrainer(model, args, **given)))
    assert (found.predictions == plain.predictions).all() and found.predictions.shape[1] > 3
    assert not (found.predictions == before).all() and private.run.steps == 2
    with raises("FC809", ValueError, match="Seq2SeqTrainer"):
        PrivateSeq2SeqTrainer(model, privacy=privacy())


def test_files_have_nothing_of_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Norms and shares are on the screen; what is published with weights has none of them."""
    private = trainer(tmp_path, max_steps=4, save_steps=2, save_strategy="steps")
    private.train()
    private.save_state()
    shown = [text for text in capsys.readouterr().out.splitlines() if "median norm" in text]
    assert [text.split("   ")[0] for text in shown] == ["step 2", "step 4"]
    states = [*tmp_path.rglob("trainer_state.json")]
    assert len(states) >= 2 and "epsilon" in states[0].read_text()
    assert {*torch.load(tmp_path / "checkpoint-4" / "privacy.pt")} & {"readings"} == set()
    for file in tmp_path.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        assert b"clipped_share" not in content and b"median_norm" not in content, file


def test_logs_and_target_epsilon(tmp_path: Path) -> None:
    private = trainer(
        tmp_path,
        of_privacy={"noise_multiplier": None, "target_epsilon": 3.0},
        max_steps=4,
        warmup_steps=2,
    )
    private.train()
    logs = [entry for entry in private.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [2, 4]
    assert 0 < logs[0]["epsilon"] < logs[1]["epsilon"] == private.epsilon
    assert 2.9 < private.epsilon <= 3.0
    assert [step for step, _ in private.run.readings] == [2, 4]
    assert all(0 <= reading.clipped_share <= 1 for _, reading in private.run.readings)
    assert all(reading.median_norm > 0 for _, reading in private.run.readings)
    assert all(entry["samples_per_second"] > 0 for entry in logs)
    assert "grad_norm" not in logs[0]
    assert private.state.log_history[-1]["epsilon"] == private.epsilon
    json.dumps(private.state.log_history)
    assert logs[1]["learning_rate"] < private.args.learning_rate  # the schedule has four steps
    told = r"(?s)computed for 4 steps, of which 4 are done; found 4.*resume_from_checkpoint=True"
    with raises("FC583", ValueError, match=told):
        private.train()


def test_lora_trains_and_saves_its_adapter(tmp_path: Path) -> None:
    model = peft.get_peft_model(
        bert(), peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
    )
    before = weights(model)
    trainer(tmp_path, model, max_steps=2, save_strategy="steps", save_steps=1).train()
    changed = {n for n, t in weights(model).items() if not torch.equal(t, before[n])}
    assert changed
    assert all("lora_" in name or "modules_to_save" in name for name in changed)
    resumed = peft.PeftModel.from_pretrained(bert(), tmp_path / "checkpoint-2")
    assert all(torch.equal(t, weights(model)[n]) for n, t in weights(resumed).items())
    again = peft.get_peft_model(
        bert(), peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
    )
    trainer(tmp_path, again, max_steps=2).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-1")
    )
    assert all(torch.equal(t, weights(model)[n]) for n, t in weights(again).items())


def test_own_losses(tmp_path: Path) -> None:
    """``compute_loss_func`` gives one loss for each sample, or is refused."""

    def of_samples(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return F.cross_entropy(outputs.logits, labels, reduction="none")

    own, default = bert(), bert()
    trainer(tmp_path, own, max_steps=1, more={"compute_loss_func": of_samples}).train()
    trainer(tmp_path, default, max_steps=1).train()
    torch.testing.assert_close(own.classifier.weight, default.classifier.weight, rtol=1e-6, atol=0)

    def of_batch(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return F.cross_entropy(outputs.logits, labels)

    with raises("FC804", ValueError, match=r"shape \[\] for \d"):
        trainer(tmp_path, max_steps=2, more={"compute_loss_func": of_batch}).train()


def test_options_of_the_engine(tmp_path: Path) -> None:
    """Adaptive clipping: its bound goes on from a checkpoint."""
    options = {"clipping": AdaptiveBound(min_clipbound=1e-3, clipbound_learning_rate=1.0)}
    of_privacy = {"noise_multiplier": 0.3, "accountant": "rdp", "engine_options": options}
    private = trainer(
        tmp_path, of_privacy=of_privacy, max_steps=2, save_strategy="steps", save_steps=1
    )
    private.train()
    assert private.run.optimizer.max_grad_norm != 1.0
    resumed = trainer(tmp_path, of_privacy=of_privacy, max_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.run.optimizer.max_grad_norm == pytest.approx(private.run.optimizer.max_grad_norm)


def test_a_second_training_takes_the_data_of_now(tmp_path: Path) -> None:
    """Another dataset, and one that has grown: what is drawn, and with which rate."""
    private = trainer(tmp_path, cls=Recording, max_steps=1, of_privacy={"accountant": "rdp"})
    private.train()
    spent = private.epsilon
    other = Texts(44)
    other.tokens = 31 - other.tokens
    private.train_dataset, private.drawn = other, []
    private.train()
    assert rows(other, torch.cat(private.drawn[0]))
    assert private.run.engine.accountant.history == [(1.0, 1 / 4, 1), (1.0, 1 / 8, 1)]
    assert private.epsilon > spent
    other.tokens, other.lengths, other.labels = (
        torch.cat([x, x[:10]]) for x in (other.tokens, other.lengths, other.labels)
    )
    private.train()
    assert private.run.engine.accountant.history[-1] == (1.0, 1 / 9, 1)


def test_a_budget_is_for_a_sample_rate(tmp_path: Path) -> None:
    of_privacy = {"noise_multiplier": None, "target_epsilon": 3.0}

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    private = trainer(tmp_path, of_privacy=of_privacy, max_steps=4)
    private.add_callback(Stop())
    private.train()
    private.train_dataset = Texts(6)
    with raises("FC583", ValueError, match=r"probability 0\.25.*1\."):
        private.train()
    assert private.run.steps == 1


def test_hooks_come_off_when_training_ends(tmp_path: Path) -> None:
    """Also when it fails. Another trainer then trains the model as it would a fresh one."""
    model = bert()
    private = trainer(tmp_path, model, max_steps=1, **SGD)
    private.train()
    failing = trainer(tmp_path, model, cls=PlainOptimizer, max_steps=1)
    with pytest.raises(RuntimeError, match="not private"):
        failing.train()
    assert not any("forward" in vars(module) for module in list(model.modules())[1:])
    assert not any(module._forward_hooks for module in model.modules())
    fresh = bert()
    fresh.load_state_dict(model.state_dict())
    for trained in (model, fresh):
        args = arguments(tmp_path, max_steps=2, **SGD)
        Trainer(trained, args, train_dataset=Texts(20)).train()
    for name, tensor in weights(fresh).items():
        assert torch.equal(model.state_dict()[name], tensor), name


#: Beside this noise nothing is seen of the samples.
NOISY = {"max_grad_norm": 1e-6, "noise_multiplier": 1e4, "accountant": "rdp"}


def test_noise_is_never_drawn_again(tmp_path: Path) -> None:
    """Neither in a second training, whose optimizer is another object around the same one."""
    private = trainer(tmp_path, max_steps=1, **SGD, of_privacy=NOISY)
    changes = []
    for _ in range(2):
        before = private.model.classifier.weight.detach().clone()
        private.train()
        changes.append(private.model.classifier.weight.detach() - before)
    assert (changes[0] - changes[1]).abs().max() > 0.1 * changes[0].abs().max()
    assert (
        private.run.optimizer.original_optimizer is private.optimizer.optimizer.original_optimizer
    )
