"""Law: documents that share a block are trained as if each had a block of its own, whatever the layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from facility.dataset import LOSS, START, DatasetError, Documents, PreparedDataset
from facility.exchange.checkpoints.separate_documents import refusal_of_lengths
from facility.exchange.messages.loss_curve import loss_curve_of
from facility.exchange.messages.report import read_report
from facility.exchange.task_words import Task
from facility.preparing.build import Request, prepare_dataset
from facility.preparing.sources import Fields
from facility.training.data.documents import advice, trial
from facility.training.model import read_config
from tests.pico import save_pico
from tests.preparing.chats import chats, save_chat_tokenizer
from tests.preparing.corpora import sentences, write_json_lines
from tests.training.families import save_tiny
from tests.training.federation import largest_difference, weights, write_dataset
from tests.training.layouts import FOUR, TWO, arguments, rounds_in

VOCABULARY = 336
SIZE = {"vocab_size": VOCABULARY, "max_position_embeddings": 256}


def prepare_chats(place: Path, family: str = "chatml", *, count: int = 20, **changes: Any) -> PreparedDataset:
    """Conversations of one or two turns in blocks that hold several."""
    place.mkdir(parents=True)
    tokenizer = save_chat_tokenizer(place / "tokenizer", family)
    records = [*chats(count // 2, turns=1), *chats(count - count // 2, turns=2, start=3000)]
    request = Request(
        inputs=[str(write_json_lines(place / "train.jsonl", records))],
        validation=[str(write_json_lines(place / "validation.jsonl", chats(12, turns=1, start=6000)))],
        tokenizer=tokenizer,
        out=place / "out",
        block_tokens=256,
        task="chat",
        fields=Fields(chat=True),
    )
    return prepare_dataset(dataclasses.replace(request, **changes)).dataset


def whole_batch(dataset: PreparedDataset, **training: Any) -> dict[str, Any]:
    """Settings under which every step sees every document, so that blocks of any kind give the same batch."""
    return {"batch_sequences": len(dataset.split("train")), "learning_rate": 1e-3, "epsilon": 1e-6, **training}


def apart_as_alone(tmp_path: Path, layouts: dict[str, dict[str, Any]], ranks: int, models: dict[str, Path]) -> None:
    apart = prepare_chats(tmp_path / "apart")
    alone = prepare_chats(tmp_path / "alone", documents="padded")
    assert len(alone.split("train")) > 2 * len(apart.split("train")) >= 8, "several documents in every block"
    settings = whole_batch(alone)
    rounds_in([(f, arguments(tmp_path / f / "alone", m, alone.directory, **settings)) for f, m in models.items()])
    rounds_in(
        [
            (f"{f} {name}", arguments(tmp_path / f / name, m, apart.directory, **whole_batch(apart), **layout))
            for f, m in models.items()
            for name, layout in layouts.items()
        ],
        ranks=ranks,
    )
    for f, model in models.items():
        expected = read_report(tmp_path / f / "alone/out")
        assert largest_difference(model, tmp_path / f / "alone/out") > 1e-3
        for name in layouts:
            found = read_report(tmp_path / f / name / "out")
            assert largest_difference(tmp_path / f / "alone/out", tmp_path / f / name / "out") < 1e-5, (f, name)
            for figure in ("loss_received", "loss_returned", "training_loss"):
                assert getattr(found, figure) == pytest.approx(getattr(expected, figure), abs=1e-5), (f, name)


@pytest.mark.slow
def test_documents_in_one_block_train_as_alone(tmp_path: Path):
    models = {
        "llama": save_pico(tmp_path / "llama-model", "llama", **SIZE),
        "gpt2": save_pico(tmp_path / "gpt2-model", "gpt2", vocab_size=VOCABULARY, n_positions=256),
        "gemma3": save_tiny(tmp_path / "gemma3-model", "gemma3_text", sliding_window=8, **SIZE),
    }
    apart_as_alone(tmp_path, {"one": {}, "chunked": {"chunked_loss": "auto"}}, 1, models)


@pytest.mark.slow
def test_documents_in_one_block_train_as_alone_on_two_ranks(tmp_path: Path):
    models = {"llama": save_pico(tmp_path / "llama-model", "llama", **SIZE)}
    apart_as_alone(tmp_path, {name: TWO[name] for name in ("fsdp", "replicas", "1f1b")}, 2, models)


@pytest.mark.slow
def test_documents_in_one_block_train_as_alone_in_every_layout(tmp_path: Path):
    models = {
        "llama": save_pico(tmp_path / "llama-model", "llama", tie_word_embeddings=True, **SIZE),
        "qwen3": save_tiny(tmp_path / "qwen3-model", "qwen3", **SIZE),
    }
    apart_as_alone(tmp_path / "two", TWO, 2, models)
    apart_as_alone(tmp_path / "four", FOUR, 4, models)


def test_joined_documents_do_see_each_other(tmp_path: Path):
    """What the law above would miss if the mask were never made: joined blocks give another loss."""
    model = save_pico(tmp_path / "model", "llama", **SIZE)
    apart, joined = prepare_chats(tmp_path / "apart"), prepare_chats(tmp_path / "joined", documents="joined")
    rounds_in(
        [(d.directory.parent.name, arguments(d.directory.parent / "r", model, d.directory)) for d in (apart, joined)]
    )
    one, other = (read_report(tmp_path / name / "r/out").loss_received for name in ("apart", "joined"))
    assert abs(one - other) > 1e-4


def test_plain_text_keeps_its_documents_apart_too(tmp_path: Path):
    """Loss on the validation blocks: that of every piece of a document computed alone by transformers."""
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    texts = [{"text": text} for text in sentences(200)]
    request = Request(
        inputs=[str(write_json_lines(tmp_path / "a.jsonl", texts[:160]))],
        validation=[str(write_json_lines(tmp_path / "b.jsonl", texts[160:]))],
        tokenizer=tokenizer,
        out=tmp_path / "data",
        block_tokens=64,
        documents="separate",
    )
    dataset = prepare_dataset(request).dataset
    model = save_pico(tmp_path / "model", "llama", **SIZE)
    rounds_in([("r", arguments(tmp_path / "r", model, dataset.directory))])
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for ids, marks in zip(dataset.split("validation"), dataset.marks("validation"), strict=True):
        assert marks[0] & START
        starts = [i for i, mark in enumerate(marks) if mark & START]
        for a, b in zip(starts, [*starts[1:], len(ids)], strict=True):
            if not marks[a] & LOSS:
                assert b == len(ids) and not (marks[a:] & LOSS).any(), "what fills the last block"
                continue
            assert (marks[a:b] & LOSS).all()
            piece = torch.tensor(ids[a:b].astype("int64"))[None]
            with torch.no_grad():
                logits = net(input_ids=piece).logits[0, :-1]
            total += F.cross_entropy(logits, piece[0, 1:], reduction="sum").item()
            count += b - a - 1
    assert read_report(tmp_path / "r/out").loss_received == pytest.approx(total / count, abs=1e-5)


@pytest.mark.slow
def test_a_family_that_reads_a_block_as_one_text_is_refused(tmp_path: Path):
    dataset, alone = prepare_chats(tmp_path / "a"), prepare_chats(tmp_path / "b", documents="padded")
    models = {
        "mamba": save_tiny(tmp_path / "mamba-model", "mamba", state_size=8, vocab_size=VOCABULARY),
        "bloom": save_tiny(tmp_path / "bloom-model", "bloom", vocab_size=VOCABULARY),
    }
    cases = [(name, arguments(tmp_path / name, model, dataset.directory)) for name, model in models.items()]
    said = rounds_in(cases, expect=2)
    for name in models:
        assert "--documents padded" in said[name][0] and "Traceback" not in said[name][0], said[name][0]
    rounds_in([(f"{n}-alone", arguments(tmp_path / n / "alone", m, alone.directory)) for n, m in models.items()])
    assert weights(tmp_path / "mamba/alone/out").keys() == weights(models["mamba"]).keys()


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}


def test_a_document_beyond_the_original_length_would_change_the_positions_of_the_others(tmp_path: Path):
    """The trial before the first step is too short to see it; the trainer refuses such blocks before it begins."""
    rotary = LONGROPE | {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    sizes = SIZE | {"hidden_size": 32, "num_attention_heads": 4, "original_max_position_embeddings": 64}
    model = save_tiny(tmp_path / "model", "phi3", **sizes, rope_parameters=rotary)
    net = AutoModelForCausalLM.from_pretrained(model)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    net.config.use_cache = False
    last, short, long = (torch.randint(VOCABULARY, (count,)) for count in (10, 20, 70))
    with torch.no_grad():
        after = [net(**trial(first, last).inputs).logits[0, -10:] for first in (short, long)]
        alone = net(**trial(last).inputs).logits[0]
    assert torch.allclose(after[0], alone, atol=1e-4) and not torch.allclose(after[1], alone, atol=1e-2)
    config = read_config(model)
    assert not refusal_of_lengths(config, 64, "chat")
    assert refusal_of_lengths(config, 65, "preference").endswith("fewer")
    told = refusal_of_lengths(config, 65, "chat")
    assert "longer than 64 tokens a phi3" in told and "prepare the dataset with --block-tokens 64" in told
    dataset, padded = prepare_chats(tmp_path / "data"), prepare_chats(tmp_path / "padded", documents="padded")
    refused = rounds_in([("longrope", arguments(tmp_path / "longrope", model, dataset.directory))], expect=2)
    assert (
        "documents share blocks of 256 tokens" in refused["longrope"][0] and "Traceback" not in refused["longrope"][0]
    )
    rounds_in([("padded", arguments(tmp_path / "taken", model, padded.directory))])


@pytest.mark.parametrize("task", ["causal-lm", "chat", "preference"])
def test_what_is_advised_for_a_family_that_cannot_keep_documents_apart_can_be_prepared(task: Task, tmp_path: Path):
    """Preferences were to be prepared padded or joined, and plain text padded, which `facility.prepare` refuses."""
    fields = Fields(chat=task != "causal-lm", pairs=task == "preference")
    ways: tuple[Documents, ...] = ("padded", "joined", "separate")
    for sharing in ways:
        given: dict[str, Any] = {"inputs": ["a"], "tokenizer": tmp_path, "out": tmp_path, "block_tokens": 8}
        try:
            taken = Request(**given, task=task, fields=fields, documents=sharing).sharing == sharing
        except DatasetError:
            taken = False
        assert taken == (sharing == "separate" or sharing in advice(task)), sharing


def test_a_step_without_anything_to_predict_has_no_part_in_the_training_loss(tmp_path: Path):
    """It counted as a loss of 0: of a batch of one block that bears no loss, the mean of the round was too low."""
    dataset = write_dataset(tmp_path / "data")
    raw = json.loads((dataset / "dataset.json").read_text())
    for split in raw["splits"]:
        marks = np.full(np.load(dataset / f"{split}.npy").shape, LOSS, np.uint8)
        marks[:, 0] |= START
        marks[1::2] &= START
        np.save(dataset / f"{split}.marks.npy", marks)
    (dataset / "dataset.json").write_text(json.dumps(raw | {"task": "chat", "documents": "padded"}))
    model, chosen = save_pico(tmp_path / "model"), {"steps": 8, "batch_sequences": 1}
    rounds_in([("one", arguments(tmp_path, model, dataset, **chosen))])
    report = read_report(tmp_path / "out")
    curve = loss_curve_of(report)
    assert report.steps == 8 and 0 < len(curve) < 8
    assert all(4 < loss < 6 for _, loss in curve), "of 128 tokens that nobody has learned: log(128) = 4.85"
    assert report.training_loss == pytest.approx(sum(loss for _, loss in curve) / len(curve), abs=1e-5)
