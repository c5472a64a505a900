"""The repeated blocks of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from facility.exchange.errors import InputError

if TYPE_CHECKING:
    from torch import nn

OTHER_SENSES = ("vision", "visual", "image", "audio", "speech")
"""In the names of the encoders of a model that reads more than text."""


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of repeated blocks and its name: the `ModuleList` that holds most parameters.

    A list of single layers (MarkupLM has fifty embeddings of XPath's tags) is not one of blocks; those of an encoder of
    images or sounds are not where a model of text has others. Raises `InputError` where the model has none.
    """
    from torch import nn

    candidates = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(any(block.children()) for block in module)
    ]
    if not candidates:
        raise InputError(
            f"{type(model).__name__} holds no list of blocks: looked for the torch.nn.ModuleList with most parameters, "
            "found none; this model can neither be sharded by blocks nor split into stages"
        )
    of_text = [one for one in candidates if not any(word in one[1] for word in OTHER_SENSES)]
    _, name, blocks = max(of_text or candidates, key=lambda c: (c[0], -len(c[1])))
    return name, blocks
