"""Law: an exported adapter, read as vLLM reads it, adds to the base what peft adds; what vLLM refuses is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coordinator.models.adapter_export import export_adapter
from coordinator.models.adapter_import import import_adapter
from coordinator.models.adapter_serving import served_by_vllm
from tests.aggregation.test_adapter_import import BOTH, published
from tests.pico import save_pico
from tests.training.families import save_tiny

PREFIX = "base_model.model."
FEW = {"target_modules": ["q_proj"]}


def exported(place: Path, family: str, **changes: Any) -> tuple[Path, Path, str]:
    """Base, a published adapter that went through a federation's model to its export, and what the command says."""
    base = save_pico(place / "base", family) if family == "llama" else save_tiny(place / "base", family)
    adapter = published(place / "adapter", base, **changes)
    import_adapter(adapter, base=base, out=place / "model")
    told = export_adapter(place / "model", base=base, out=place / "out")
    return base, place / "out", told


def as_vllm_adds(adapter: Path, experts: int) -> dict[str, torch.Tensor]:
    """What the files add to each weight by vLLM's rules.

    `PEFTHelper`: the scale. `parse_fine_tuned_lora_name`: layers. `_stack_moe_lora_weights`: `experts.base_layer` is
    gate_up_proj and `experts` down_proj; A is (experts * rank, in), B is (out, rank * experts), experts innermost.
    """
    told = json.loads((adapter / "adapter_config.json").read_text())
    scale = told["lora_alpha"] / (told["r"] ** 0.5 if told["use_rslora"] else told["r"])
    tensors, added = load_file(adapter / "adapter_model.safetensors"), {}
    for name in tensors:
        layer, ending, _ = name.removeprefix(PREFIX).partition(".lora_A.weight")
        if not ending:
            continue
        a, b = tensors[name], tensors[f"{PREFIX}{layer}.lora_B.weight"]
        if ".experts" not in layer:
            added[f"{layer}.weight"] = scale * b @ a
            continue
        outputs = b.reshape(len(b), -1, experts).permute(2, 0, 1)
        inner = layer.endswith(".base_layer")
        key = f"{layer.removesuffix('.base_layer')}.{'gate_up_proj' if inner else 'down_proj'}"
        added[key] = scale * outputs @ a.reshape(experts, -1, a.shape[-1])
    return added


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("llama", {"r": 2}, "--enable-lora --max-lora-rank 8"),
        ("llama", {"r": 20, "use_rslora": True}, "--enable-lora --max-lora-rank 32"),
        (
            "qwen3_moe",
            FEW | {"target_parameters": BOTH},
            "--enable-lora --max-lora-rank 8 (in models whose experts it holds as matrices also "
            "--enable-mixed-moe-lora-format)",
        ),
        ("mixtral", FEW | {"target_parameters": BOTH[::-1]}, "also --enable-mixed-moe-lora-format)"),
    ],
)
def test_vllm_adds_what_peft_adds(tmp_path: Path, family: str, changes: dict[str, Any], options: str):
    base, adapter, told = exported(tmp_path, family, **changes)
    assert told.endswith(options) and "; for vLLM " in told
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = {name: one.clone() for name, one in plain.state_dict().items()}
    merged = PeftModel.from_pretrained(plain, adapter).merge_and_unload().state_dict()
    added = as_vllm_adds(adapter, getattr(plain.config, "num_local_experts", None) or 4)
    changed = {name for name, one in merged.items() if not one.equal(before[name])}
    assert changed == set(added) and len(added) > 2
    for name, expected in added.items():
        torch.testing.assert_close(merged[name] - before[name], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("llama", {"use_dora": True}, "DoRA"),
        ("llama", {"modules_to_save": ["lm_head"]}, r"modules trained whole (lm_head)"),
        ("llama", {"use_dora": True, "modules_to_save": ["lm_head"]}, "DoRA and modules trained whole (lm_head)"),
        (
            "qwen3_moe",
            FEW | {"target_parameters": BOTH[1:]},
            "adapters on only one of experts.gate_up_proj and experts.down_proj",
        ),
    ],
)
def test_what_vllm_refuses_is_said_with_the_way_out(tmp_path: Path, family: str, changes: dict[str, Any], why: str):
    _, _, told = exported(tmp_path, family, **changes)
    assert told.endswith(f"vLLM does not serve {why} beside a base: give it the merged model (--merged)")


def test_a_rank_above_what_vllm_takes_is_said():
    told = served_by_vllm({"r": 513, "use_dora": False, "modules_to_save": None}, [])
    assert "a rank above 512" in told
