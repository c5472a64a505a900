"""The base below adapters in half precision, where that is how it was published and how it is computed with.

Training in half precision rounds every weight to it before it is multiplied. A frozen weight that is stored so loses
nothing when it is held so: the products are the same bit for bit, in half of the memory (Dettmers et al. 2023, arXiv
2305.14314, compare adapters on such a base), and autocast makes no copy of it.
"""

from __future__ import annotations

import torch
from torch import nn

from facility.exchange.checkpoints.adapter_targets import STATE_SPACE
from facility.exchange.checkpoints.checkpoint import Checkpoint, torch_dtype
from facility.exchange.messages.settings import TrainingSettings
from facility.training.model import names_of
from facility.training.quantized_base import frozen_layers


def hold_in_half(model: nn.Module, checkpoint: Checkpoint, settings: TrainingSettings) -> int:
    """Make frozen linear layers of the blocks half-precision parameters, in place, on the meta device; their number.

    `checkpoint` holds the base. None where adapters are not what is trained, or are DoRA's, which measure the rows of
    the weights in float32; nor where kernels use weights without calling their layers, as state-space models' do; nor
    where the base is held in 4 bits.
    """
    dtype, lora = getattr(torch, settings.compute_dtype), settings.lora
    family = getattr(getattr(model, "config", None), "model_type", "")
    if not lora.rank or lora.dora or lora.quantize_base != "none" or dtype == torch.float32 or family in STATE_SPACE:
        return 0
    names, held = names_of(model, checkpoint).disk, 0
    for name, layer in frozen_layers(model).items():
        entry = checkpoint.tensors.get(names[f"{name}.weight"])
        if entry is not None and torch_dtype(entry.dtype) == dtype:
            layer.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)
            held += 1
    return held
