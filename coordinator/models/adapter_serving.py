"""Whether vLLM serves an exported adapter beside its base, and what it must be started with.

Its rules as of 2026, in vllm-project/vllm: `vllm/lora/peft_helper.py` (`PEFTHelper`), `lora_model.py` (names),
`model_manager.py` (fused experts) beside it, and `vllm/config/lora.py` (`MaxLoRARanks`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What `--max-lora-rank` takes; vLLM's default is 16."""
FACTOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_[AB]\.weight")
EXPERTS, INNER = ".experts", ".experts.base_layer"
"""Of one layer's fused experts: where peft keeps the factors of `down_proj`, and of `gate_up_proj`."""


def vllm_refuses(configuration: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Why vLLM does not load the adapter with this `adapter_config.json` and these tensors; empty where it does."""
    layers = {found["layer"] if (found := FACTOR.fullmatch(name)) else "" for name in names}
    reasons = []
    if configuration["use_dora"]:
        reasons.append("DoRA")
    if saved := configuration["modules_to_save"]:
        reasons.append(f"modules trained whole ({', '.join(saved)})")
    if "" in layers and not reasons:
        reasons.append("tensors that are no factors of a layer")
    if configuration["r"] > RANKS[-1]:
        reasons.append(f"a rank above {RANKS[-1]}")
    outer = {layer.removesuffix(EXPERTS) for layer in layers if layer.endswith(EXPERTS)}
    inner = {layer.removesuffix(INNER) for layer in layers if layer.endswith(INNER)}
    if outer != inner:
        reasons.append("adapters on only one of experts.gate_up_proj and experts.down_proj")
    return reasons


def served_by_vllm(configuration: Mapping[str, Any], names: Iterable[str]) -> str:
    """A clause for the user: the options that vLLM needs, or what else to serve."""
    held = list(names)
    if reasons := vllm_refuses(configuration, held):
        return f"vLLM does not serve {' and '.join(reasons)} beside a base: give it the merged model (--merged)"
    rank = next(rank for rank in RANKS if rank >= configuration["r"])
    fused = " (in models whose experts it holds as matrices also --enable-mixed-moe-lora-format)"
    experts = fused if any(f"{INNER}.lora_" in name for name in held) else ""
    return f"for vLLM --enable-lora --max-lora-rank {rank}{experts}"
