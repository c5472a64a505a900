"""Oracles of QLoRA: TRL's SFTTrainer and DPOTrainer over bitsandbytes' layers and peft's adapters, on the CPU.

Both sides hold the same base in 4 bits and begin with the same adapters. TRL rounds the adapters of such a model to
bfloat16 when its trainer is made; here they are held in float32, so they are put back before TRL's first step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from facility.exchange.messages.report import read_report
from tests.pico import save_pico
from tests.preparing.chats import chats, save_chat_tokenizer
from tests.training.federation import weights
from tests.training.layouts import arguments, rounds_in
from tests.training.test_against_trl import ADAM, STEPS, train_with_trl, whole_batch, write_and_prepare
from tests.training.test_documents import SIZE
from tests.training.test_preference import BETA, SETTINGS, pairs, preferences_by_trl, prepare_pairs
from tests.training.test_quantized_base import pefts

pytest.importorskip("bitsandbytes", reason="holds a base in 4 bits: pip install 'crossfed[quantized]'")
pytest.importorskip("trl", reason="trl is not installed")

pytestmark = pytest.mark.slow
LORA: dict[str, Any] = {"rank": 4, "quantize_base": "nf4"}
NOTHING = 1e-30
"""A learning rate under which adapters stay as they begin."""
NEAR = 1e-5
"""Of adapter weights that move by 1e-3 a step."""


def both_begin(place: Path, model: Path, dataset: Path, settings: dict[str, Any]) -> Any:
    """The model as a user of TRL makes it: the base in 4 bits by bitsandbytes, the adapters that ours begin with."""
    rounds_in([("begin", arguments(place, model, dataset, **settings | {"learning_rate": NOTHING}))])
    return pefts(model, place / "out", LORA)


def in_float32(net: Any) -> Callable[[Any], None]:
    """What puts the adapters back that TRL rounds."""
    begun = {name: one.detach().clone() for name, one in net.named_parameters() if one.requires_grad}
    assert begun and all(one.dtype == torch.float32 for one in begun.values())

    def put_back(trainer: Any) -> None:
        for name, one in trainer.model.named_parameters():
            if one.requires_grad:
                assert one.dtype == torch.bfloat16  # else this is not needed any more
                one.data = begun[name]

    return put_back


def apart(update: Path, net: Any) -> float:
    """Largest difference of an adapter's weight; infinite where none has moved from where adapters begin."""
    held = weights(update)
    state = {name.replace(".default.", "."): one for name, one in net.state_dict().items()}
    if not any(one.abs().max() > 1e-4 for name, one in held.items() if ".lora_B." in name):
        return float("inf")
    return max((one.float() - state[name].float()).abs().max().item() for name, one in held.items())


def base_in_bits(net: Any) -> set[str]:
    return {type(module).__name__ for module in net.modules() if type(module).__name__ == "Linear4bit"}


def test_conversations_above_a_base_in_4_bits_are_trls(tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path / "tokenizer", "chatml"))
    records: list[Any] = chats(8, turns=1)
    dataset = write_and_prepare(tmp_path / "data", tmp_path / "tokenizer", records, "last-turn")
    wide = {"hidden_size": 64, "intermediate_size": 128}
    model = save_pico(tmp_path / "model", "llama", **SIZE | wide)
    settings = whole_batch(dataset) | ADAM | {"lora": LORA}
    net = both_begin(tmp_path / "begin", model, dataset.directory, settings)
    assert base_in_bits(net)
    rounds_in([("here", arguments(tmp_path / "here", model, dataset.directory, **settings))])
    given = [{"prompt": r["messages"][:-1], "completion": r["messages"][-1:]} for r in records]
    trainer = train_with_trl(tmp_path / "trl", net, tokenizer, given, made=in_float32(net))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    found = read_report(tmp_path / "here/out").training_loss
    assert found == pytest.approx(sum(losses) / STEPS, abs=1e-4)  # TRL rounds what it logs
    assert apart(tmp_path / "here/out", trainer.model) < NEAR


def test_preferences_above_a_base_in_4_bits_are_trls(tmp_path: Path):
    """The reference of both is the base in 4 bits with adapters off."""
    records = pairs(6)
    dataset = prepare_pairs(tmp_path / "data", records)
    model = save_pico(tmp_path / "model", "llama", **SIZE | {"hidden_size": 64, "intermediate_size": 128})
    settings = SETTINGS | {"batch_sequences": 6, "preference": {"beta": BETA}, "lora": LORA}
    net = both_begin(tmp_path / "begin", model, dataset.directory, settings)
    assert base_in_bits(net)
    rounds_in([("here", arguments(tmp_path / "here", model, dataset.directory, **settings))])
    trainer = preferences_by_trl(tmp_path / "trl", net, tmp_path / "data/tokenizer", records, in_float32(net))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-4)
    assert read_report(tmp_path / "here/out").training_loss == pytest.approx(sum(losses) / STEPS, abs=1e-4)
    assert apart(tmp_path / "here/out", trainer.model) < NEAR
