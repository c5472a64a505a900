"""What drawn federations train beside a Llama on blocks of tokens: other families and other tasks."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from facility.exchange.task_words import Task
from facility.preparing.build import Request, prepare_dataset
from facility.preparing.sources import Fields
from tests.pico import save_pico
from tests.preparing.chats import save_chat_tokenizer
from tests.preparing.corpora import write_json_lines
from tests.training.families import save_tiny
from tests.training.federation import write_dataset, write_masked_words
from tests.training.test_preference import pairs
from tests.training.test_tasks import save_classifier, write_classes

CAUSAL = ("gpt2", "qwen2", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3", "phi3", "gpt_neox", "mamba", "lfm2")
CLASSIFIED = ("bert", "llama", "gpt2")
BLOCK_TOKENS = 96
"""Of conversations and preferences."""


def draw_kind(chance: random.Random) -> tuple[Task, str]:
    """Task and family; more often blocks of tokens than anything else."""
    tasks: list[Task] = ["causal-lm", "masked-lm", "classification", "chat", "preference"]
    task = chance.choice(tasks + 5 * tasks[:1])
    families = {"causal-lm": CAUSAL, "classification": CLASSIFIED, "masked-lm": ("bert",)}.get(task, ("llama", "qwen2"))
    return task, chance.choice(families)


def write_kind(root: Path, names: list[str], kind: tuple[Task, str]) -> None:
    """Put model and datasets of a kind where `write_federation` has put its own."""
    task, family = kind
    model = root / "model"
    shutil.rmtree(model)
    for number, name in enumerate(names):
        directory = root / "sites" / name / "dataset"
        shutil.rmtree(directory)
        vocabulary = write_one(directory, task, number)
    if task == "classification":
        save_classifier(model, 2, family)
    elif task in ("chat", "preference"):
        save_pico(model, family, vocab_size=vocabulary, max_position_embeddings=BLOCK_TOKENS)
    elif family in ("gpt2", "qwen2", "bert"):
        save_pico(model, family)
    else:
        save_tiny(model, family)


def as_conversations(preferred: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"messages": [*one["prompt"], *one["chosen"]]} for one in preferred]


def write_one(directory: Path, task: Task, number: int) -> int:
    """One facility's dataset; how many tokens its vocabulary has."""
    if task == "classification":
        write_classes(directory, seed=number)
    elif task == "masked-lm":
        write_masked_words(directory)
    elif task == "causal-lm":
        write_dataset(directory, seed=number)
    else:
        directory.parent.mkdir(parents=True, exist_ok=True)
        records, later = pairs(10, 500 * number), pairs(4, 3000)
        if task == "chat":
            records, later = map(as_conversations, (records, later))
        prepare_dataset(
            Request(
                inputs=[str(write_json_lines(directory.parent / "records.jsonl", records))],
                validation=[str(write_json_lines(directory.parent / "validation.jsonl", later))],
                tokenizer=save_chat_tokenizer(directory.parent / "tokenizer"),
                out=directory,
                block_tokens=BLOCK_TOKENS,
                task=task,
                fields=Fields(chat=True, pairs=task == "preference"),
            )
        )
    return int(json.loads((directory / "dataset.json").read_text())["vocabulary_size"])
