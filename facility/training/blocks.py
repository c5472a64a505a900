"""What a repeated block of a model consists of."""

from __future__ import annotations

from torch import nn


def layers_of(block: nn.Module) -> list[nn.Module]:
    """A block, or what it lists: a list of layers (Funnel) is never called, its layers are."""
    return [layer for inner in block for layer in layers_of(inner)] if isinstance(block, nn.ModuleList) else [block]
