"""Activation checkpointing of a block: recompute its activations in backward.

Done here by wrapping the block's own forward, not by transformers' switch: names stay, and the activation that a
pipeline stage injects enters outside of what is computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""Operations whose results `selective` keeps: matrix products and attention, dear to compute again."""


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_in_backward(block: nn.Module, *, selective: bool) -> None:
    """Replace the block's forward by one that keeps its inputs only (and dear results, if `selective`)."""
    inner = block.forward
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(_policy)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, **options, **kwargs)

    block.forward = forward  # type: ignore[method-assign]
