"""How many operations the weights of a model ask for on each token, from which a round reports its MFU."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from torch import nn

from facility.training.layer_configs import largest

EXPERTS = re.compile(r"(^|\.)experts\.")
"""In the names of the weights of fused experts, whose first dimension counts them."""
SHARED = re.compile(r"(^|\.)albert_layer_groups\.")
"""In the names of the weights of groups of layers, each run for several layers of the configuration."""
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""In configurations: how many experts a token is given to."""


def weight_operations(model: nn.Module) -> float:
    """Floating-point operations on one token of the weights of a whole model: 6 for each that multiplies, 4 where it is
    frozen and no gradient of it is made. NaN where it is not known how many of its experts a token is given to.

    An embedding, of tokens or of positions, is looked up and multiplies nothing, unless the output layer is the same
    weight. Of fused experts those count that a token is given to. Layers that share a weight multiply by it once each.
    """
    config = getattr(model, "config", None)
    chosen, holders = experts_of_a_token(config), _holders(model)
    total = 0.0
    for name, parameter in model.named_parameters():
        # Of two that hold a bias one may add it; what vectors multiply is next to nothing.
        share = holders[id(parameter)] * runs_of(name, config) if parameter.dim() > 1 else 1.0
        if EXPERTS.search(name) and parameter.dim() == 3:
            share *= chosen / parameter.shape[0]
        total += (6.0 if parameter.requires_grad else 4.0) * share * parameter.numel()
    return total


def experts_of_a_token(config: Any) -> float:
    """To how many of its experts a mixture gives each token, by the model's configuration; NaN: it does not say."""
    text = config.get_text_config() if config is not None else None
    return float(next((value for name in CHOSEN if (value := largest(text, name))), math.nan))


def runs_of(name: str, config: Any) -> float:
    """How often a token passes the layer of a weight: more than once where groups of layers share one, as in ALBERT."""
    groups = getattr(config, "num_hidden_groups", None)
    return config.num_hidden_layers / groups if groups and SHARED.search(name) else 1.0


def _holders(model: nn.Module) -> Counter[int]:
    """How many modules hold each weight (`id`), but for embeddings."""
    return Counter(
        id(one)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for one in module.parameters(recurse=False)
    )
