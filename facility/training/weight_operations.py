"""How many operations the weights of a model ask for on each token, from which a round reports its MFU."""

from __future__ import annotations

import math
import re
from typing import Any

from torch import nn

EXPERTS = re.compile(r"(^|\.)experts\.")
"""In the names of the weights of fused experts, whose first dimension counts them."""
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""In configurations: how many experts a token is given to."""


def weight_operations(model: nn.Module) -> float:
    """Floating-point operations on one token of the weights of a whole model: 6 for each that multiplies, 4 where it is
    frozen and no gradient of it is made. NaN where it is not known how many of its experts a token is given to.

    An embedding, of tokens or of positions, is looked up and multiplies nothing, unless the output layer is the same
    weight. Of fused experts those count that a token is given to.
    """
    chosen = experts_of_a_token(getattr(model, "config", None))
    looked_up = _looked_up(model)
    total = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in looked_up:
            continue
        share = chosen / parameter.shape[0] if EXPERTS.search(name) and parameter.dim() == 3 else 1.0
        total += (6.0 if parameter.requires_grad else 4.0) * share * parameter.numel()
    return total


def experts_of_a_token(config: Any) -> float:
    """To how many of its experts a mixture gives each token, by the model's configuration; NaN: it does not say."""
    text = config.get_text_config() if config is not None else None
    return float(next((value for name in CHOSEN if (value := getattr(text, name, None))), math.nan))


def _looked_up(model: nn.Module) -> set[int]:
    """The weights (`id`) that embeddings alone hold, and no output layer too."""
    held: dict[bool, set[int]] = {True: set(), False: set()}
    for module in model.modules():
        held[isinstance(module, nn.Embedding)].update(map(id, module.parameters(recurse=False)))
    return held[True] - held[False]
