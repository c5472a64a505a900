"""Oracles of preferences: a loop in plain PyTorch over single answers, and TRL's DPOTrainer where it is installed."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional as F

from facility.dataset import LOSS, START, DatasetError, PreparedDataset
from facility.exchange.messages.report import read_report
from facility.preparing.build import Request, prepare_dataset
from facility.preparing.conversations import preference_of
from facility.preparing.sources import Fields
from tests.pico import save_pico
from tests.preparing.chats import save_chat_tokenizer
from tests.preparing.corpora import sentences, write_json_lines
from tests.training.federation import largest_difference, weights
from tests.training.layouts import TWO, arguments, rounds_in
from tests.training.test_documents import SIZE

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
STEPS, BETA, SMOOTHING = 3, 0.3, 0.1
PREFERENCE = {"beta": BETA, "label_smoothing": SMOOTHING}
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "learning_rate": 1e-3,
    "epsilon": 1e-6,
    "beta2": 0.999,
    "schedule": "constant",
    "preference": PREFERENCE,
}


def pairs(count: int, start: int = 0) -> list[dict[str, Any]]:
    texts = iter(sentences(3 * count, start))
    return [
        {
            "prompt": [{"role": "user", "content": next(texts)}],
            "chosen": [{"role": "assistant", "content": next(texts)}],
            "rejected": [{"role": "assistant", "content": next(texts)}],
        }
        for _ in range(count)
    ]


def prepare_pairs(place: Path, records: list[Any], **changes: Any) -> PreparedDataset:
    place.mkdir(parents=True)
    values = {
        "inputs": [str(write_json_lines(place / "train.jsonl", records))],
        "validation": [str(write_json_lines(place / "validation.jsonl", pairs(4, 3000)))],
        "tokenizer": save_chat_tokenizer(place / "tokenizer"),
        "out": place / "out",
        "block_tokens": 192,
        "task": "preference",
        "fields": Fields(chat=True, pairs=True),
    }
    return prepare_dataset(Request(**(values | changes))).dataset


def answers(dataset: PreparedDataset, split: str) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """(ids, labels) of the chosen and of the rejected answer of every pair."""
    found = []
    for ids, marks in zip(dataset.split(split), dataset.marks(split), strict=True):
        starts = [*numpy.flatnonzero(marks & START).tolist(), len(ids)]
        row = []
        for a, b in list(zip(starts, starts[1:], strict=False))[:2]:
            labels = numpy.where(marks[a:b] & LOSS, ids[a:b], -100).astype(numpy.int64)
            row.append((torch.from_numpy(ids[a:b].astype(numpy.int64)), torch.from_numpy(labels)))
        found.append(row)
    return found


def differences(net: Any, rows: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> torch.Tensor:
    """log p(chosen) - log p(rejected), each answer run alone."""
    sums = [
        [-F.cross_entropy(net(input_ids=ids[None]).logits[0, :-1], labels[1:], reduction="sum") for ids, labels in row]
        for row in rows
    ]
    return torch.stack([chosen - rejected for chosen, rejected in sums])


def dpo(margin: torch.Tensor) -> torch.Tensor:
    return (-(1 - SMOOTHING) * F.logsigmoid(BETA * margin) - SMOOTHING * F.logsigmoid(-BETA * margin)).mean()


@pytest.mark.slow
def test_preferences_are_a_plain_loop_over_single_answers_in_every_layout(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    dataset, model = prepare_pairs(tmp_path / "data", pairs(6)), save_pico(tmp_path / "model", "llama", **SIZE)
    settings = SETTINGS | {"batch_sequences": 6}
    rounds_in([("one", arguments(tmp_path / "one", model, dataset.directory, **settings))])
    layouts = {name: TWO[name] for name in ("fsdp", "replicas", "1f1b")}
    rounds_in(
        [(n, arguments(tmp_path / n, model, dataset.directory, **settings, **more)) for n, more in layouts.items()],
        ranks=2,
    )
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = answers(dataset, "train")
    with torch.no_grad():
        reference = differences(net, rows)
        held_out = differences(net, answers(dataset, "validation"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0)
    for _ in range(STEPS):
        loss = dpo(differences(net, rows) - reference)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    report, held = read_report(tmp_path / "one/out"), weights(tmp_path / "one/out")
    assert report.loss_received == pytest.approx(numpy.log(2), abs=1e-6)
    with torch.no_grad():
        after = dpo(differences(net, answers(dataset, "validation")) - held_out).item()
    assert report.loss_returned == pytest.approx(after, abs=1e-5)
    assert max((held[name] - net.state_dict()[name]).abs().max().item() for name in held) < 1e-5
    assert largest_difference(model, tmp_path / "one/out") > 1e-4
    for name in layouts:
        assert largest_difference(tmp_path / "one/out", tmp_path / name / "out") < 1e-5, name


@pytest.mark.slow
def test_the_reference_is_measured_once_and_stays_that_of_round_0(tmp_path: Path):
    """With adapters: the second round's loss is measured from the model of the first, not from the received one."""
    dataset, model = prepare_pairs(tmp_path / "data", pairs(6)), save_pico(tmp_path / "model", "llama", **SIZE)
    settings = SETTINGS | {"batch_sequences": 6, "learning_rate": 2e-2, "lora": {"rank": 4}}
    said = rounds_in([("first", arguments(tmp_path / "a", model, dataset.directory, **settings))])
    assert "10 pairs measured" in said["first"][0]
    first = read_report(tmp_path / "a/out")
    received = (tmp_path / "a/out").rename(tmp_path / "received")
    (received / "manifest.json").unlink()
    second = settings | {"lora": {"rank": 4, "base": str(model)}}
    again = arguments(tmp_path / "a", received, dataset.directory, round=1, **second)
    said = rounds_in([("second", again)])
    assert "pairs measured" not in said["second"][0]
    assert read_report(tmp_path / "a/out").loss_received == pytest.approx(first.loss_returned, abs=1e-6)
    late = arguments(tmp_path / "late", received, dataset.directory, round=1, **second)
    said = rounds_in([("late", late)], expect=2)
    assert "set training.preference.reference" in said["late"][0]
    for name, reference in (("told", str(model)), ("beneath", "base")):
        told = second | {"preference": PREFERENCE | {"reference": reference}}
        rounds_in([(name, arguments(tmp_path / name, received, dataset.directory, round=1, **told))])
        assert read_report(tmp_path / name / "out").loss_received == pytest.approx(first.loss_returned, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"dora": True}, {"modules_to_save": ["lm_head"]}, {"base": "the model"}], ids=str)
def test_whoever_comes_later_measures_the_model_beneath_its_adapters(tmp_path: Path, more: dict[str, Any]):
    """As of a copy of the initial model: with magnitudes and saved modules, of a base that travels or lies there."""
    dataset, model = prepare_pairs(tmp_path / "data", pairs(6)), save_pico(tmp_path / "model", "llama", **SIZE)
    more = {key: str(model) if key == "base" else value for key, value in more.items()}
    settings = SETTINGS | {"batch_sequences": 6, "learning_rate": 2e-2, "lora": {"rank": 4} | more}
    rounds_in([("first", arguments(tmp_path / "a", model, dataset.directory, **settings))])
    received = (tmp_path / "a/out").rename(tmp_path / "received")
    (received / "manifest.json").unlink()
    if "base" not in more:  # the base travels too
        for path in model.iterdir():
            shutil.copy(path, received)
    for name, reference in (("copy", str(model)), ("beneath", "base")):
        told = settings | {"preference": PREFERENCE | {"reference": reference}}
        rounds_in([(name, arguments(tmp_path / name, received, dataset.directory, round=1, **told))])
    one, other = (read_report(tmp_path / name / "out") for name in ("copy", "beneath"))
    assert (one.loss_received, one.loss_returned) == (other.loss_received, other.loss_returned)
    assert largest_difference(tmp_path / "copy/out", tmp_path / "beneath/out") == 0


@pytest.mark.slow
@needs_trl
@pytest.mark.parametrize("rank", [0, 4])
def test_preferences_are_trls(tmp_path: Path, rank: int):
    """Weights and losses of TRL's DPOTrainer; under LoRA both begin with the same adapters."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    records = pairs(6)
    dataset, model = prepare_pairs(tmp_path / "data", records), save_pico(tmp_path / "model", "llama", **SIZE)
    adapters = {"lora": {"rank": rank, "targets": ["q_proj", "v_proj"]}} if rank else {}
    settings = SETTINGS | {"batch_sequences": 6, "preference": {"beta": BETA}} | adapters
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if rank:  # what the trainer begins with: a round whose rate is next to nothing
        rounds_in(
            [("begin", arguments(tmp_path / "b", model, dataset.directory, **settings | {"learning_rate": 1e-30}))]
        )
        net = PeftModel.from_pretrained(net, tmp_path / "b/out", is_trainable=True)
    rounds_in([("here", arguments(tmp_path / "here", model, dataset.directory, **settings))])
    trainer = preferences_by_trl(tmp_path / "trl", net, tmp_path / "data/tokenizer", records)
    held = weights(tmp_path / "here/out")
    state = {name.replace(".default.", "."): t for name, t in trainer.model.state_dict().items()}
    assert max((held[name] - state[name]).abs().max().item() for name in held) < 1e-5


def preferences_by_trl(
    place: Path, net: Any, tokenizer: Path, records: list[Any], made: Callable[[Any], None] = lambda trainer: None
) -> Any:
    """TRL's trainer after its steps, with the settings of `SETTINGS`. `made`: called before the first."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(
        output_dir=str(place),
        per_device_train_batch_size=len(records),
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="adamw_torch",
        adam_beta2=0.999,
        adam_epsilon=1e-6,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=BETA,
        max_length=192,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = DPOTrainer(
        model=net,
        args=config,
        train_dataset=Dataset.from_list(records),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
    )
    made(trainer)
    trainer.train()
    return trainer


def test_every_shape_of_a_pair_is_the_same_pair():
    record = pairs(1)[0]
    ask, good, bad = (record[name][0]["content"] for name in ("prompt", "chosen", "rejected"))
    shapes = [
        record,
        {"prompt": ask, "chosen": good, "rejected": bad},
        {"chosen": record["prompt"] + record["chosen"], "rejected": record["prompt"] + record["rejected"]},
    ]
    found = [preference_of(shape, "here") for shape in shapes]
    assert all(one.messages == found[0].messages and one.rejected == found[0].rejected for one in found)
    assert found[0].other.messages[-1]["content"] == bad and found[0].messages[-1]["content"] == good
    with pytest.raises(DatasetError, match="expected an object with chosen"):
        preference_of({"prompt": ask, "chosen": good}, "here")


def test_pairs_that_do_not_fit_are_counted(tmp_path: Path):
    records: list[Any] = pairs(4)
    records[0]["rejected"][0]["content"] = "tetto " * 100
    records[1]["prompt"][0]["content"] = "tetto " * 200
    dataset = prepare_pairs(tmp_path / "data", records)
    entry = dataset.manifest.splits["train"]
    assert (entry.blocks, entry.truncated_documents, entry.dropped_documents) == (3, 1, 1)
    dataset.verify()


def test_pairs_with_equal_answers_are_left_out_and_counted(tmp_path: Path):
    """Equal as given, or as far as half a block holds them: from them nothing is learnt."""
    alike = [one | {"rejected": one["chosen"]} for one in pairs(3, 600)]
    text = " ".join(sentences(80))
    late = [
        {"prompt": one["prompt"]}
        | {side: [{"role": "assistant", "content": text + side}] for side in ("chosen", "rejected")}
        for one in pairs(2, 900)
    ]
    dataset = prepare_pairs(tmp_path / "mixed", pairs(6) + alike + late)
    entry, alone = dataset.manifest.splits["train"], prepare_pairs(tmp_path / "alone", pairs(6))
    assert (entry.documents, entry.blocks, entry.dropped_documents) == (11, 6, 5)
    assert numpy.array_equal(dataset.split("train"), alone.split("train"))
    with pytest.raises(DatasetError, match="3 of them bear no loss, or have two equal answers, within 192 tokens"):
        prepare_pairs(tmp_path / "none", alike)
