"""What a model is trained to do: the inputs of a forward pass, its targets, and the loss in nats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

IGNORED = -100
"""Target of a position that counts for nothing (Hugging Face's convention)."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of one forward pass."""

    inputs: dict[str, torch.Tensor]
    """Keyword arguments of the model's forward."""
    targets: torch.Tensor
    """One target per prediction; `IGNORED` where none is asked."""

    @property
    def predictions(self) -> int:
        """Number of predictions that the loss averages over."""
        return int((self.targets != IGNORED).sum())


class CausalLM:
    """Predict the next token of every token of a block."""

    name = "causal_lm"

    @property
    def factory(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    def batch(self, split: Any, indices: np.ndarray, seeds: list[int]) -> Batch:
        """The sequences `indices` of a split; `seeds` (one a sequence) is for tasks that draw."""
        ids = torch.from_numpy(np.asarray(split[indices], dtype=np.int64))
        targets = torch.full_like(ids, IGNORED)
        targets[:, :-1] = ids[:, 1:]
        return Batch(inputs={"input_ids": ids}, targets=targets)

    def loss_sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum over predictions of the cross entropy in float32."""
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


Task = CausalLM


def task_named(name: str) -> Task:
    return {"causal_lm": CausalLM}[name]()
