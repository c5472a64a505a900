"""A tiny configuration of any family, from its configuration class alone: numbers follow from the names of keys."""

from __future__ import annotations

import inspect
import re
from typing import Any

TOKENS = 16
VOCABULARY = 128

RULES: list[tuple[str, Any]] = [
    (r"type_vocab_size", 2),
    (r"(^|_)(vocab_size|vocabulary_size)(_per_layer_input)?$", VOCABULARY),
    (r"pad_token_id", 0),
    (r"(bos|eos|decoder_start)_token_id", 1),
    (r"moe_num_shared_experts|n_shared_experts|num_shared_experts", 1),
    (r"(experts_per_tok|num_experts_per_token|top_?k_experts|moe_top_?k|moe_k|experts_per_token)$", 2),
    (r"^(topk_group|n_group|moe_group_size)$", 1),
    (r"(experts|expert_num)$", 4),
    (r"first_k_dense_replace|moe_layer_start_index", 1),
    (r"(moe|expert|shared).*intermediate_size$|expert_ffn_hidden_size", 16),
    (r"(key_value_heads|kv_heads|n_kv|num_query_groups|multi_query_group_num)$", 2),
    (r"(heads|n_head|num_head)$", 4),
    (r"(qk_head_dim)$", 16),
    (r"(head_dim|head_size|d_head|kv_channels|d_kv)$", 8),
    (r"(q_lora_rank|attention_rank)$", 16),
    (r"(lora_rank|_rank)$", 8),
    (r"(hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|num_blocks|nextn_predict_layers)$", 2),
    (r"(intermediate_size|ffn_dim|ffn_hidden_size|n_inner|d_ff|inner_dim|mlp_dim|ffn_config|feed_forward_size)$", 64),
    (
        r"(hidden_size|d_model|n_embd|hidden_dim|embed_dim|embedding_size|emb_dim|embedding_dim|word_embed_proj_dim)$",
        32,
    ),
    (r"^(dim|width|lru_width)$", 32),
    (r"(state_size|d_state|ssm_state_size|mamba_d_ssm)$", 8),
    (r"(chunk_size|chunk_length)$", 8),
    (r"(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|seq_length|n_ctx|max_seq_length)$", 64),
    (r"drop|jitter", 0.0),
]
"""Pattern of a key's name -> its small value; the first that fits decides, and keys of other types stay."""


def small(name: str, value: Any) -> Any:
    """A key's small value; the given one where it is not a number or no rule fits."""
    if isinstance(value, bool) or not (value is None or isinstance(value, int | float)):
        return value
    for pattern, number in RULES:
        if re.search(pattern, name):
            if value is None and not re.search("token_id|heads|vocab", name):
                return value
            return 0 if isinstance(number, float) and type(value) is int else number
    if name.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
        return VOCABULARY - 1
    return value


def inner_kinds(kind: type) -> dict[str, type]:
    """The classes of the configurations inside one of this class, by the key that holds each."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = {n: one for n, one in getattr(kind, "sub_configs", {}).items() if getattr(one, "model_type", "")}
    for name, default in getattr(kind, "sub_configs_defaults", {}).items():
        if name not in found and default.model_type in CONFIG_MAPPING:
            found[name] = CONFIG_MAPPING[default.model_type]
    return found


def shrunk(kind: type, **changes: Any) -> dict[str, Any]:
    """Keys of a small configuration of this class; configurations inside are small too."""
    keys: dict[str, Any] = {}
    inside = inner_kinds(kind)
    for name, parameter in inspect.signature(kind.__init__).parameters.items():  # type: ignore[misc]
        if name in ("self", "kwargs", "args") or parameter.default is inspect.Parameter.empty:
            continue
        if name in inside:
            keys[name] = shrunk(inside[name])
            continue
        value = small(name, parameter.default)
        if value is not parameter.default:
            keys[name] = value
    if {"kv_lora_rank", "num_key_value_heads"} <= set(inspect.signature(kind.__init__).parameters):  # type: ignore[misc]
        keys["num_key_value_heads"] = 4  # keys and values come from one latent
    return keys | changes


def tiny(family: str, **changes: Any) -> Any:
    """A small configuration of a family (transformers' `model_type`)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "attribute_map", {})}
    special = {name: value for name, value in SPECIAL.get(family, {}).items()}
    always = {"num_labels": changes.pop("num_labels")} if "num_labels" in changes else {}
    base = shrunk(kind)
    for name, value in special.items():
        special[name] = base[name] | value if isinstance(base.get(name), dict) and isinstance(value, dict) else value
    return kind(**(base | special | {k: v for k, v in changes.items() if k in known and k not in special} | always))


SIDE = 32
"""Height and width of the images that tiny image classifiers take."""
IMAGE_RULES: list[tuple[str, Any]] = [
    (r"^image_size$", SIDE),
    (r"^patch_size$", 4),
    (r"^window_size$", 2),
    (r"^train_size$", [SIDE, SIDE]),
]
"""What fixes the size of images, beside `RULES`."""
DEEP = r"^(depths?|num_block_repeats|n_attn_blocks|stage_num_blocks|stage_numb_of_layers)$"
WIDE = r"^(hidden_sizes|neck_hidden_sizes|embed_dims?|base_attn_unit_dims|stage_\w+_channels|embedding_size)$"


TWO_STAGES = {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4}
IMAGE_SPECIAL: dict[str, dict[str, Any]] = {"swin": TWO_STAGES, "donut-swin": TWO_STAGES}
"""What an image family needs beside the rules: windows that fit the images of each stage."""


def tiny_image(family: str, share: int, **changes: Any) -> Any:
    """A small configuration of an image family: one block a stage, widths divided by `share`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    keys = image_keys(kind, share)
    for name, inner in inner_kinds(kind).items():
        keys[name] = image_keys(inner, share)
    return kind(**(keys | IMAGE_SPECIAL.get(family, {}) | changes))


def image_keys(kind: type, share: int) -> dict[str, Any]:
    keys = {name: value for name, value in shrunk(kind).items() if not isinstance(value, dict)}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():  # type: ignore[misc]
        default = parameter.default
        if fixed := [value for pattern, value in IMAGE_RULES if re.search(pattern, name)]:
            keys[name] = (
                [fixed[0], fixed[0]] if isinstance(default, list | tuple) and name != "train_size" else fixed[0]
            )
        elif isinstance(default, list | tuple) and default and all(type(one) in (int, float) for one in default):
            if re.search(DEEP, name):
                keys[name] = [1] * len(default)
            elif re.search(WIDE, name):
                keys[name] = [max(1, one // share) for one in default]
            elif "drop" in name:
                keys[name] = [0.0] * len(default)
        elif type(default) is int and re.search(WIDE, name):
            keys[name] = max(1, default // share)
    return keys


ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
BYTES = {"vocab_size": 260, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
BYTE_LAYERS = BYTES | {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
QWEN4 = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "linear_num_value_heads": 4,
    "hc_count": 2,
    "hc_lowrank": 8,
    "eos_token_id": 1,
    "ple_layer_ids": [1],
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
TWICE = ["mamba", "hybrid", "mamba", "hybrid", "mamba"]
"""Layers of which two share their attention, as all of a real Zamba's do."""
SPECIAL: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "youtu": {"pad_token_id": None},  # else `from_pretrained` empties the row of that token, in a tied head too
    "zaya": {"num_experts_per_tok": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "esmc": {"num_key_value_heads": 4},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "visual_embed": False},
    "lilt": {"hidden_size": 48},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "moe"], "mamba_num_heads": 8, "n_groups": 2},
    "qwen3_5": {"text_config": {"layer_types": ["linear_attention", "full_attention"]}},
    "qwen3_5_moe": {"text_config": {"layer_types": ["linear_attention", "full_attention"]}},
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [4, 4],  # their product is the length of a sequence
        "attn_layers": ["local", "lsh"],
        "feed_forward_size": 64,
        "num_buckets": 2,
        "hash_seed": 0,
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 5, "layers_block_type": TWICE},
    "zamba2": {"num_hidden_layers": 5, "layers_block_type": TWICE},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "phimoe": {"router_jitter_noise": 0.0},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": ROTARY, "sliding_attention": ROTARY},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "gemma4_unified_text": {"global_head_dim": 16},
    "gemma4_text": {"global_head_dim": 16},  # other dimensions than of layers that see a window, as in real ones
    "neomme": {"head_dim": 16},
    "t5": {"decoder_start_token_id": 0},
    "perceiver": {
        **{"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2, "max_position_embeddings": 16},
        **{"num_self_attention_heads": 4, "num_cross_attention_heads": 4},
    },
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3, 4],
        "patcher_config": BYTE_LAYERS,
        "encoder_config": BYTE_LAYERS | {"hidden_size_global": 64},
        "decoder_config": BYTE_LAYERS | {"hidden_size_global": 64},
        "global_config": BYTE_LAYERS | {"hidden_size": 64},
    },
}
"""What a family needs beside the rules."""
