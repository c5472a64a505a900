"""How many operations the attention of a model asks for on each token, beside those of its weights."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from facility.training.layer_configs import layer_configs

NO_ATTENTION = ("linear_attention", "mlp", "moe", "dense", "conv")
"""In `layer_types` of configurations: layers whose work on a token does not grow with the block."""


def attention_operations(model: nn.Module, tokens: int) -> float:
    """Floating-point operations on one token of a block of `tokens` in the attention of a whole model, forward and
    backward.

    12 for each dimension of a layer's heads and position that the token sees (Chowdhery et al. 2022, arXiv 2204.02311,
    appendix B): all of the block, half of it where attention is causal, and no more than a sliding window or a chunk
    holds. Documents that share a block, and sparse attention of other kinds, count as if they saw it whole. NaN where
    layers see blocks of unlike lengths, as in a hierarchical image model.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    causal, layers = sees_the_past_only(model), _layers(config)
    if hasattr(config, "depths"):
        return math.nan
    return 12.0 * sum(_width(one) * _positions_seen(one, kind, tokens, causal=causal) for one, kind in layers)


def sees_the_past_only(model: nn.Module) -> bool:
    """Is the model's attention causal? As its layers say; where none says it, a masked language model's is not."""
    from transformers import AutoModelForMaskedLM

    said = [one for module in model.modules() if isinstance(one := getattr(module, "is_causal", None), bool)]
    if said:
        return any(said)
    return type(model.config) not in AutoModelForMaskedLM._model_mapping and bool(_text_layers(model.config))


def _text_layers(config: Any) -> bool:
    """Of text, not of images?"""
    return bool(getattr(config.get_text_config(), "vocab_size", 0))


def _layers(config: Any) -> list[tuple[Any, str]]:
    """The configuration and the kind of each layer that attends."""
    configs = layer_configs(config)
    kinds = getattr(config, "layer_types", None) or [
        "sliding_attention" if getattr(one, "sliding_window", None) else "full_attention" for one in configs
    ]
    return [(one, kind) for one, kind in zip(configs, kinds, strict=True) if kind not in NO_ATTENTION]


def _width(config: Any) -> float:
    """Dimensions of all heads of a layer; NaN where stages have unlike numbers of heads."""
    heads = getattr(config, "num_attention_heads", None) or 0
    return heads * _dimensions(config, heads) if isinstance(heads, int) else math.nan


def _dimensions(config: Any, heads: int) -> float:
    """Of a head: the mean of what keys are compared in and what values have; latent attention holds them apart."""
    values = getattr(config, "v_head_dim", None)
    rotated, other = (getattr(config, f"qk_{part}_head_dim", None) for part in ("rope", "nope"))
    if values and rotated and other:
        return float(rotated + other + values) / 2
    return float(getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) / max(heads, 1))


def _positions_seen(config: Any, kind: str, tokens: int, *, causal: bool) -> float:
    """Mean number of positions that a token of a block sees."""
    if kind == "chunked_attention":
        tokens = min(tokens, getattr(config, "attention_chunk_size", None) or tokens)
    window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    reach = min(window or tokens, tokens)
    before = reach * (1 - reach / (2 * tokens))
    return before if causal else min(2 * before, float(tokens))
