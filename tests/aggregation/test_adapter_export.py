"""Exported adapters are peft's own: the same logits as the model they were taken from, merged or beside the base."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

from coordinator.models.adapter_export import export_adapter
from facility.exchange.checkpoints.adapters import write_adapter_config
from facility.exchange.checkpoints.image_processor import FILE
from facility.exchange.errors import InputError
from facility.exchange.messages.layout import LoraSettings
from tests.pico import save_pico
from tests.training.images import save_image_model

TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
IDS = torch.arange(12).reshape(2, 6)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def round_model(directory: Path, base: Path, family: str, *, whole: bool) -> torch.Tensor:
    """Write a round's model as aggregation does, with the base's tensors or adapters alone; returns peft's logits."""
    torch.manual_seed(3)
    settings = LoraConfig(r=2, lora_alpha=8, target_modules=TARGETS[family], fan_in_fan_out=family == "gpt2")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    tensors = {name: tensor.contiguous() for name, tensor in get_peft_model_state_dict(adapted).items()}
    targets = sorted({name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors})
    directory.mkdir()
    save_file((load_file(base / "model.safetensors") if whole else {}) | tensors, directory / "model.safetensors")
    configuration = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 8.0,
        "target_modules": targets,
        "auto_mapping": {"x": 1},
    }
    (directory / "adapter_config.json").write_text(json.dumps(configuration))
    return logits(adapted)


@pytest.mark.slow  # `tests/engine/test_how_to_load.py` does it by the commands that are shown
@pytest.mark.parametrize(("family", "whole"), [("llama", False), ("llama", True), ("gpt2", True)])
def test_peft_and_transformers_load_what_was_exported(tmp_path: Path, family: str, whole: bool):
    base = save_pico(tmp_path / "base", family)
    expected = round_model(tmp_path / "round", base, family, whole=whole)
    assert (expected - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-2
    command = [sys.executable, "-m", "coordinator.model", "--export-adapter", tmp_path / "round", "--base", base]
    done = subprocess.run([*command, "--out", tmp_path / "out", "--merged"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "loaded by peft" in done.stdout
    exported = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    assert logits(exported).equal(expected)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_names_are_those_that_vllm_reads(tmp_path: Path, family: str):
    """The rules of vLLM's `parse_fine_tuned_lora_name` and `PEFTHelper`: a factor's layer lies between the prefix and
    `.lora_A.weight` or `.lora_B.weight`, other tensors are errors, and so are DoRA and modules saved whole."""
    base = save_pico(tmp_path / "base", family)
    round_model(tmp_path / "round", base, family, whole=True)
    export_adapter(tmp_path / "round", base=base, out=tmp_path / "out")
    linear = {
        name for name, one in AutoModelForCausalLM.from_pretrained(base).named_modules() if hasattr(one, "weight")
    }
    factors: dict[str, set[str]] = {}
    for name in load_file(tmp_path / "out/adapter_model.safetensors"):
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        assert found is not None, name
        factors.setdefault(found[1], set()).add(found[2])
    assert factors and set(factors) <= linear and all(both == {"A", "B"} for both in factors.values())
    told = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert told["r"] == 2 and told["lora_alpha"] == 8.0 and isinstance(told["target_modules"], list)
    assert told["bias"] == "none" and not told["modules_to_save"] and not told["use_dora"]


def test_a_merged_image_classifier_has_its_image_processor(tmp_path: Path):
    base, model = save_image_model(tmp_path / "base", "vit"), tmp_path / "round"
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["classifier"])
    adapted = get_peft_model(AutoModelForImageClassification.from_pretrained(base), settings)
    model.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in get_peft_model_state_dict(adapted).items()}
    save_file(tensors, model / "adapter_model.safetensors")
    write_adapter_config(model, LoraSettings(rank=2, targets=["q_proj"]), tensors)
    export_adapter(model, base=base, out=tmp_path / "out", merged=True)
    merged = tmp_path / "out" / "merged"
    AutoModelForImageClassification.from_pretrained(merged)
    assert (merged / FILE).read_bytes() == (base / FILE).read_bytes()


def test_what_does_not_belong_together_is_refused(tmp_path: Path):
    base, other = save_pico(tmp_path / "base", "llama"), save_pico(tmp_path / "other", "gpt2")
    round_model(tmp_path / "round", base, "llama", whole=False)
    with pytest.raises(InputError, match="do not fit the base model"):
        export_adapter(tmp_path / "round", base=other, out=tmp_path / "out")
    with pytest.raises(InputError, match="holds no adapters"):
        export_adapter(base, base=base, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
