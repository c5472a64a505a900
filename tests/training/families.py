"""Tiny models of the families that transformers knows: real classes, thousands of parameters."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
"""What makes a configuration small, under the names that most families use; a family takes those it knows."""

LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "phimoe": {"router_jitter_noise": 0.0},
}
"""What else a family needs. PhiMoE draws its experts while it trains, so that layouts, which draw apart, differ;
without jitter the best ones are always taken."""


def tiny_config(family: str, **changes: Any) -> Any:
    """A small configuration of a family (transformers' `model_type`), dropout and routing noise off."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "attribute_map", {})}
    small = {name: value for name, value in SMALL.items() if name in known}
    return AutoConfig.for_model(family, **(small | SPECIAL.get(family, {}) | changes))


def save_tiny(
    directory: Path, family: str, *, factory: str = "AutoModelForCausalLM", seed: int = 0, **changes: Any
) -> Path:
    """Write a tiny model of a family as `save_pretrained` does, every number of it drawn, and return its directory."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, factory).from_config(tiny_config(family, **changes))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point():
                buffer.uniform_(0.0, 0.5)  # a router's correction bias, for instance: zero until trained
    model.save_pretrained(directory)
    return directory
