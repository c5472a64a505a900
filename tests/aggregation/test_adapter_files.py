"""The next model of a round of adapters is one that peft and transformers load as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from coordinator.aggregation.settings import AggregationSettings
from facility.exchange.checkpoints.adapters import write_adapter_config
from facility.exchange.checkpoints.checkpoint import ADAPTER, INDEX, SINGLE, open_checkpoint, save_tensors
from facility.exchange.checkpoints.delta import encode_update
from facility.exchange.checkpoints.delta_decoding import decode_update
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.manifest import Manifest, write_manifest
from tests.aggregation import make
from tests.aggregation.make import aggregate
from tests.aggregation.test_lora import adapter_update
from tests.pico import save_pico

LORA = LoraSettings(rank=2, alpha=8.0, targets=["q_proj"])
SHAPES = {"lora_A": (2, 32), "lora_B": (32, 2)}
NAME = "base_model.model.model.layers.{}.self_attn.q_proj.{}.weight"
SETTINGS = AggregationSettings(rule="mean", weights="equal", **make.UNBOUNDED)


def adapters(seed: int) -> make.Tensors:
    shapes = {NAME.format(layer, half): shape for layer in range(4) for half, shape in SHAPES.items()}
    return make.random_tensors(seed, shapes, torch.float32, 0.3)


def next_model(base: Path, out: Path, seed: int) -> make.Tensors:
    """Aggregate two updates into `out`; returns the mean of their adapters."""
    sent = [adapters(seed), adapters(seed + 1)]
    updates = [
        adapter_update(out.with_name(f"{out.name}-{i}"), tensors, base, f"f{i}") for i, tensors in enumerate(sent)
    ]
    aggregate(base=base, updates=updates, out=out, settings=SETTINGS, adapters=LORA)
    return {name: (sent[0][name] + sent[1][name]) / 2 for name in sent[0]}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(12).reshape(2, 6)).logits


def expected(base: Path, means: make.Tensors) -> torch.Tensor:
    """Of the base with alpha / rank * B A added by hand."""
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for layer, block in enumerate(model.model.layers):
            first, second = (means[NAME.format(layer, half)] for half in ("lora_A", "lora_B"))
            block.self_attn.q_proj.weight += LORA.alpha / LORA.rank * second @ first
    return logits(model)


@pytest.mark.parametrize("shard_bytes", [2_000_000_000, 40_000])
def test_both_load_every_rounds_model(tmp_path: Path, shard_bytes: int):
    base = save_pico(tmp_path / "base")
    tensors = make.read_all(base)
    (base / SINGLE).unlink()
    save_tensors(base, tensors.items(), shard_bytes=shard_bytes)
    write_manifest(base, Manifest(kind="model", federation="test", round=0))
    received = base
    for number in (1, 2):
        out = tmp_path / f"m{number}"
        wanted = expected(base, next_model(received, out, 10 * number))
        assert (wanted - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-2
        torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(out)), wanted, atol=1e-5, rtol=1e-5)
        with_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
        torch.testing.assert_close(logits(with_peft), wanted, atol=1e-5, rtol=1e-5)
        received = out


def test_adapters_that_travel_alone_keep_their_name_in_messages_too(tmp_path: Path):
    base, start = save_pico(tmp_path / "base"), tmp_path / "m0"
    make.checkpoint(start, adapters(0))
    (start / SINGLE).rename(start / ADAPTER)
    write_adapter_config(start, LORA, adapters(0))
    write_manifest(start, Manifest(kind="model", federation="test", round=0))
    means = next_model(start, tmp_path / "m1", 10)
    wanted = expected(base, means)
    encode_update(full=tmp_path / "m1", reference=start, out=tmp_path / "message", encoding="changed")
    decode_update(tmp_path / "message", reference=start, out=tmp_path / "decoded")
    for model in (tmp_path / "m1", tmp_path / "decoded"):
        assert sorted(path.name for path in model.glob("*.safetensors*")) == [ADAPTER]
        with_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), model)
        torch.testing.assert_close(logits(with_peft), wanted, atol=1e-5, rtol=1e-5)


def test_an_archive_with_the_adapters_in_another_file_gets_the_name(tmp_path: Path):
    """As earlier versions wrote them: `model-00002-of-00002.safetensors`."""
    base = save_pico(tmp_path / "base")
    start = shutil.copytree(base, tmp_path / "m0")
    make.checkpoint(tmp_path / "adapters", adapters(0))
    (start / SINGLE).rename(start / "model-00001-of-00002.safetensors")
    (tmp_path / "adapters" / SINGLE).rename(start / "model-00002-of-00002.safetensors")
    names = dict.fromkeys(make.read_all(base), "model-00001-of-00002.safetensors")
    names |= dict.fromkeys(adapters(0), "model-00002-of-00002.safetensors")
    (start / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    write_adapter_config(start, LORA, adapters(0))
    write_manifest(start, Manifest(kind="model", federation="test", round=0))
    wanted = expected(base, next_model(start, tmp_path / "m1", 10))
    opened = open_checkpoint(tmp_path / "m1").tensors
    assert {opened[name].file.name for name in adapters(0)} == {ADAPTER}
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "m1")), wanted, atol=1e-5, rtol=1e-5
    )
