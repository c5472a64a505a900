"""Federations of conversations and of preferences under StreamFlow: unlike facilities, whole models and adapters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.archive.rounds import Archive
from coordinator.archive.summary import summary
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.models.adapter_export import export_adapter
from coordinator.preflight.check import check
from coordinator.publishing.publish import publish
from facility.prepare import main as prepare
from tests.engine.engines import streamflow
from tests.pico import save_pico
from tests.preparing.chats import TEMPLATES, save_chat_tokenizer
from tests.preparing.corpora import WORDS, write_json_lines

SIZE = {"vocab_size": 336, "max_position_embeddings": 256}
FORWARD, BACKWARD = "che viene dopo", "che viene prima di"


def questions(asked: str, count: int) -> list[tuple[str, str]]:
    """A question and its one right answer: the word after, or the word before, another one."""
    step = 1 if asked == FORWARD else -1
    return [(f"{asked} {WORDS[i % len(WORDS)]}?", WORDS[(i + step) % len(WORDS)]) for i in range(count)]


def conversations(asked: str, count: int) -> list[dict[str, Any]]:
    """One facility writes them as OpenAI does, the other as ShareGPT does."""
    if asked == FORWARD:
        named = [
            ({"role": "user", "content": q}, {"role": "assistant", "content": a}) for q, a in questions(asked, count)
        ]
        return [{"messages": list(pair)} for pair in named]
    told = [({"from": "human", "value": q}, {"from": "gpt", "value": a}) for q, a in questions(asked, count)]
    return [{"conversations": list(pair), "system": "Rispondi."} for pair in told]


def preferences(asked: str, count: int) -> list[dict[str, Any]]:
    """The right answer is preferred to its word spelled backwards."""
    records = []
    for question, answer in questions(asked, count):
        told = [{"role": "assistant", "content": text} for text in (answer, answer[::-1])]
        prompt = [{"role": "user", "content": question}]
        records.append({"prompt": prompt, "chosen": [told[0]], "rejected": [told[1]]})
    return records


RECORDS = {"chat": conversations, "preference": preferences}


def prepared(place: Path, task: str, asked: str, tokenizer: Path) -> Path:
    """What a facility makes of its own text, by the command that a facility runs."""
    place.mkdir(parents=True)
    train = write_json_lines(place / "train.jsonl", RECORDS[task](asked, 60))
    validation = write_json_lines(place / "validation.jsonl", RECORDS[task](asked, 19))
    words = ["--task", task, "--input", str(train), "--validation", str(validation), "--tokenizer", str(tokenizer)]
    words += ["--block-tokens", "128", "--out", str(place / "dataset"), "--offline", "--allow-overlap"]
    assert prepare(words) == 0
    return place / "dataset"


def federation(root: Path, task: str, **training: Any) -> Path:
    """Two facilities on this machine, one of them of two ranks; its federation.yml."""
    model = save_pico(root / "model", dtype="bfloat16", **SIZE)
    save_chat_tokenizer(model, "llama")
    facilities: list[dict[str, Any]] = []
    for name, asked in (("north", FORWARD), ("south", BACKWARD)):
        prepared(root / "sites" / name, task, asked, model)
        facilities.append({"name": name, "dataset": f"../sites/{name}/dataset", "public": {"dataset_card": True}})
    facilities[1]["training"] = {"ranks": 2}
    described = {
        "name": "tuned",
        "model": "../model",
        "rounds": 2,
        "archive": "../archive",
        "workdir": "../work",
        "training": {"steps": 6, "batch_sequences": 4, "learning_rate": 5e-3, "threads": 1} | training,
        "facilities": facilities,
    }
    path = root / "workflow" / "federation.yml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    write_rendered(read_federation(path))
    return path


LORA = {"lora": {"rank": 4}, "learning_rate": 2e-2}


@pytest.mark.slow  # a federation each; the trainer's laws on conversations and preferences are in tests/training
@pytest.mark.parametrize(
    ("task", "training"),
    [
        pytest.param("chat", {}, id="chat-whole"),
        pytest.param("chat", LORA, id="chat-lora", marks=pytest.mark.nightly),
        pytest.param("preference", {}, id="preference-whole", marks=pytest.mark.nightly),
        pytest.param("preference", LORA, id="preference-lora", marks=pytest.mark.nightly),
    ],
)
def test_facilities_tune_one_model_and_publish_it(tmp_path: Path, task: str, training: dict[str, Any]):
    path = federation(tmp_path, task, **training)
    assert not [row for row in check(path, link=False) if row.verdict == "fail"]
    result = streamflow(path, tmp_path / "engine", timeout=480)
    assert result.returncode == 0, result.stdout[-4000:]
    archive = Archive(read_federation(path).archive_path)
    data = summary(archive)
    assert [row["status"] for entry in data["rounds"] for row in entry["facilities"]] == ["ok"] * 4
    losses = [math.log(data["initial_perplexity"]), *(math.log(one["global_perplexity"]) for one in data["rounds"])]
    if task == "preference":
        assert losses[0] == pytest.approx(math.log(2), abs=1e-3)
    assert losses[0] > losses[1] > losses[2] and losses[2] < (0.98 if training else 0.9) * losses[0], losses
    assert len(data["final_evaluation"]) == 2
    out = publish(path, tmp_path / "publication")
    assert (out / "crate" / "report.html").stat().st_size > 10_000
    cards = [json.loads(file.read_text()) for file in (out / "crate" / "croissant").iterdir()]
    assert len(cards) == 2
    assert knows_more(tmp_path, out / "model", adapters="lora" in training)


def knows_more(root: Path, published: Path, *, adapters: bool) -> bool:
    """The published model loads, answers in the federation's template, and knows more than the initial one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    if adapters:
        export_adapter(published, base=root / "model", out=root / "adapter", merged=True)
        published = root / "adapter" / "merged"
    else:
        assert AutoTokenizer.from_pretrained(published).chat_template == TEMPLATES["llama"][0]
    last = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)

    def surprise(model: Any) -> float:
        total = 0.0
        for asked in (FORWARD, BACKWARD):
            for question, answer in questions(asked, len(WORDS)):
                told = [{"role": "user", "content": question}]
                before = tokenizer.apply_chat_template(told, add_generation_prompt=True)["input_ids"]
                whole = tokenizer.apply_chat_template([*told, {"role": "assistant", "content": answer}])["input_ids"]
                labels = torch.tensor([-100] * len(before) + whole[len(before) :])[None]
                with torch.no_grad():
                    total += model(input_ids=torch.tensor(whole)[None], labels=labels).loss.item()
        return total

    return surprise(last) < surprise(first)


@pytest.mark.slow
def test_check_names_the_facilities_whose_templates_differ(tmp_path: Path):
    path = federation(tmp_path, "chat")
    other = save_chat_tokenizer(tmp_path / "other", "llama", template=TEMPLATES["chatml"][0])
    (tmp_path / "sites" / "south").rename(tmp_path / "sites" / "before")
    prepared(tmp_path / "sites" / "south", "chat", BACKWARD, other)
    failing = [row for row in check(path, link=False) if row.verdict == "fail"]
    assert [(row.subject, row.check) for row in failing] == [("north", "dataset"), ("south", "dataset")], (
        "of two that differ neither is the odd one"
    )
    assert all("chat template" in row.found for row in failing)
