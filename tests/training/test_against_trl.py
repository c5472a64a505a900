"""Oracles of conversations: TRL's SFTTrainer where it is installed, and a loop in plain PyTorch everywhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from facility.dataset import DatasetError, PreparedDataset
from facility.exchange.messages.report import read_report
from facility.preparing.chat_template import chat_template_of
from facility.preparing.conversations import Conversation
from tests.cases import slow_but
from tests.pico import save_pico
from tests.preparing.chats import TEMPLATES, chats, save_chat_tokenizer
from tests.preparing.test_chat import documents
from tests.training.federation import weights
from tests.training.layouts import arguments, rounds_in
from tests.training.test_documents import SIZE, prepare_chats, whole_batch

STEPS = 3
WORDS = ("Qual?", "Questo.", "Perché?", "Così.")
ADAM = {"beta1": 0.9, "beta2": 0.999, "schedule": "constant", "weight_decay": 0.0, "clip_norm": 1.0, "steps": STEPS}
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set said = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set said = '' %}{% set rest = messages %}{% endif %}"
    "{% set asked = rest | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}{% for m in rest %}"
    "{% if m.role == 'user' %}{{ '[INST]' + (said if m == asked[-1] else '') + m.content + '[/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
"""In the manner of Mistral-Nemo: what the system says stands in the last question, and no prompt begins an answer."""
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")


def train_here(place: Path, model: Path, dataset: PreparedDataset, **training: Any) -> Path:
    settings = whole_batch(dataset) | ADAM | training
    rounds_in([("here", arguments(place, model, dataset.directory, **settings))])
    return place / "out"


def apart(one: Path, state: dict[str, torch.Tensor]) -> float:
    held = weights(one)
    return max((held[name].float() - state[name].float()).abs().max().item() for name in held)


@pytest.mark.parametrize("family", slow_but(["llama", "marked"], sorted(set(TEMPLATES) - {"phi"})))
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


def train_with_trl(
    place: Path,
    model: Path | Any,
    tokenizer: Any,
    records: list[Any],
    *,
    made: Callable[[Any], None] = lambda trainer: None,
    **settings: Any,
) -> Any:
    """TRL's trainer after its steps. `model`: a checkpoint, or a model as its user made it; `made`: called before."""
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
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) if isinstance(model, Path) else model,
        args=config,
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
    )
    made(trainer)
    trainer.train()
    return trainer


@pytest.mark.slow
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


@pytest.mark.slow
@needs_trl
def test_answers_are_where_trls_own_templates_mark_them(tmp_path: Path):
    """TRL ships the templates of many models, and of each a version that marks answers: here they need no marks.

    Its marks may begin before the answer, with what the generation prompt has written already, or take in the token
    that begins the next question (GLM). What drops or adds a thought as a turn ages is refused.
    """
    from transformers.utils.chat_template_utils import render_jinja_template
    from trl import chat_template_utils

    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = [{"role": r, "content": c} for r, c in zip(("user", "assistant") * 2, WORDS, strict=True)]
    conversation = Conversation(messages=messages, answers=[1, 3])
    alike, refused = set(), set()
    for name in sorted(name for name in dir(chat_template_utils) if name.endswith("_training_chat_template")):
        if (family := name.removesuffix("_training_chat_template")) == "get":
            continue
        marked = getattr(chat_template_utils, name)
        own = getattr(chat_template_utils, f"{family}_chat_template")
        tokenizer = SimpleNamespace(special_tokens_map=variables, chat_template=own)
        found = chat_template_of(tokenizer, tmp_path, None)
        try:
            text, spans = found.with_answers(conversation, "all-turns")
        except DatasetError as error:
            assert "when others follow" in str(error)
            refused.add(family)
            continue
        given = messages
        if found.in_parts:
            given = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
        rendered: Any = render_jinja_template(
            conversations=[given], chat_template=marked, return_assistant_tokens_mask=True, **variables
        )
        theirs = "".join(rendered[0][0][begin:end] for begin, end in rendered[1][0])
        mine = [text[begin:end] for begin, end in spans]
        assert all(answer.strip() in theirs for answer in mine), (family, mine, theirs)
        assert [[n for n, word in enumerate(WORDS) if word in answer] for answer in mine] == [[1], [3]], family
        alike.add(family)
    assert len(alike) > 20 and {"gemma", "gemma3", "llama3", "phi3", "phi3_5", "qwen2_5", "smolvlm"} <= alike
    assert {"qwen3", "gptoss"} <= refused


@pytest.mark.slow
@needs_trl
@pytest.mark.parametrize("name", ["gemma3", "phi3", "mistral"])
def test_training_with_a_models_own_template_is_trls(tmp_path: Path, name: str):
    """None of the three marks answers. Phi-3: all turns, which TRL trains with its marked version of the template."""
    from transformers import AutoTokenizer
    from trl import chat_template_utils

    own = MISTRAL if name == "mistral" else getattr(chat_template_utils, f"{name}_chat_template")
    tokenizer = AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path / "tokenizer", "phi", template=own))
    every = name == "phi3"
    records: list[Any] = chats(8, turns=1 if name == "gemma3" else 2)
    given = records
    if not every:
        given = [{"prompt": r["messages"][:-1], "completion": r["messages"][-1:]} for r in records]
    model = save_pico(tmp_path / "model", "llama", **SIZE)
    trainer = train_with_trl(
        tmp_path / "trl", model, tokenizer, given, **{"assistant_only_loss": True} if every else {}
    )
    here = write_and_prepare(tmp_path / "data", tmp_path / "tokenizer", records, "all-turns" if every else "last-turn")
    out = train_here(tmp_path / "here", model, here)
    assert apart(out, trainer.model.state_dict()) < 1e-5


def write_and_prepare(place: Path, tokenizer: Path, records: list[Any], loss: Any) -> PreparedDataset:
    from facility.preparing.build import Request, prepare_dataset
    from facility.preparing.sources import Fields
    from tests.preparing.corpora import write_json_lines

    place.mkdir()
    return prepare_dataset(
        Request(
            inputs=[str(write_json_lines(place / "train.jsonl", records))],
            validation=[str(write_json_lines(place / "validation.jsonl", chats(4, turns=1, start=4000)))],
            tokenizer=tokenizer,
            out=place / "out",
            block_tokens=128,
            task="chat",
            loss=loss,
            fields=Fields(chat=True),
        )
    ).dataset
