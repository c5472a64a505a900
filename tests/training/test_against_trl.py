"""Oracles of conversations: TRL's SFTTrainer where it is installed, and a loop in plain PyTorch everywhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from facility.dataset import PreparedDataset
from facility.exchange.messages.report import read_report
from tests.pico import save_pico
from tests.preparing.chats import TEMPLATES, chats, save_chat_tokenizer
from tests.preparing.test_chat import documents
from tests.training.federation import weights
from tests.training.layouts import arguments, rounds_in
from tests.training.test_documents import SIZE, prepare_chats, whole_batch

STEPS = 3
ADAM = {"beta1": 0.9, "beta2": 0.999, "schedule": "constant", "weight_decay": 0.0, "clip_norm": 1.0, "steps": STEPS}
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")


def train_here(place: Path, model: Path, dataset: PreparedDataset, **training: Any) -> Path:
    settings = whole_batch(dataset) | ADAM | training
    rounds_in([("here", arguments(place, model, dataset.directory, **settings))])
    return place / "out"


def apart(one: Path, state: dict[str, torch.Tensor]) -> float:
    held = weights(one)
    return max((held[name].float() - state[name].float()).abs().max().item() for name in held)


@pytest.mark.parametrize("family", sorted(set(TEMPLATES) - {"phi"}))
def test_training_on_answers_is_a_plain_loop_over_single_conversations(tmp_path: Path, family: str):
    """AdamW over the token-weighted mean of the loss of every conversation, each run through the model alone."""
    from transformers import AutoModelForCausalLM

    dataset = prepare_chats(tmp_path / "data", family)
    model = save_pico(tmp_path / "model", "llama", **SIZE)
    out = train_here(tmp_path / "here", model, dataset)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0)
    pairs = [(torch.tensor(ids)[None], torch.tensor(labels)) for ids, labels in documents(dataset)]
    count = sum(int((labels[1:] != -100).sum()) for _, labels in pairs)
    losses = []
    for _ in range(STEPS):
        loss = sum(F.cross_entropy(net(input_ids=i).logits[0, :-1], t[1:], reduction="sum") for i, t in pairs) / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert read_report(out).training_loss == pytest.approx(sum(losses) / STEPS, abs=1e-5)
    assert apart(out, net.state_dict()) < 1e-5


def train_with_trl(place: Path, model: Path, tokenizer: Any, records: list[Any], **settings: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=str(place),
        per_device_train_batch_size=len(records),
        max_steps=STEPS,
        learning_rate=1e-3,
        adam_epsilon=1e-6,
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="adamw_torch",
        adam_beta2=0.999,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_length=128,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **settings,
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer


@needs_trl
@pytest.mark.parametrize("family", ["chatml", "llama", "gemma", "phi", "marked"])
def test_training_on_answers_is_trls(tmp_path: Path, family: str):
    """TRL takes prompt and completion where a template does not mark its answers, and the marks where it does."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path / "tokenizer", family))
    turns = 2 if family == "marked" else 1
    records: list[Any] = chats(8, turns=turns)
    given = records
    if family != "marked":
        given = [{"prompt": r["messages"][:-1], "completion": r["messages"][-1:]} for r in records]
    model = save_pico(tmp_path / "model", "llama", **SIZE)
    assistant = {"assistant_only_loss": True} if family == "marked" else {}
    trainer = train_with_trl(tmp_path / "trl", model, tokenizer, given, **assistant)
    loss = "all-turns" if family == "marked" else "last-turn"
    here = write_and_prepare(tmp_path / "data", tmp_path / "tokenizer", records, loss)
    out = train_here(tmp_path / "here", model, here)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    assert read_report(out).training_loss == pytest.approx(sum(losses) / STEPS, abs=1e-4)  # TRL rounds what it logs
    assert apart(out, trainer.model.state_dict()) < 1e-5


def write_and_prepare(place: Path, tokenizer: Path, records: list[Any], loss: Any) -> PreparedDataset:
    from facility.preparing.build import Request, prepare
    from facility.preparing.sources import Fields
    from tests.preparing.corpora import write_json_lines

    place.mkdir()
    return prepare(
        Request(
            inputs=[str(write_json_lines(place / "train.jsonl", records))],
            validation=[str(write_json_lines(place / "validation.jsonl", chats(4, start=4000)))],
            tokenizer=tokenizer,
            out=place / "out",
            block_tokens=128,
            task="chat",
            loss=loss,
            fields=Fields(chat=True),
        )
    ).dataset
