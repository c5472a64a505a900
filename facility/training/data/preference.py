"""Direct preference optimisation: prefer the chosen answer to the rejected one, measured from a reference model.

R. Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", NeurIPS 2023,
arXiv 2305.18290, eq. 7: -log sigmoid(beta (log p(chosen) / q(chosen) - log p(rejected) / q(rejected))), p the model
and q the reference; label smoothing as E. Mitchell, "A note on DPO with noisy preferences", 2023 (conservative DPO).

A block holds one pair: the chosen answer with its prompt, then the rejected one with the same prompt.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from facility.dataset import LOSS, START, PreparedDataset
from facility.exchange.messages.preference import PreferenceSettings
from facility.training.data.tasks import IGNORED, Batch, TaskDefaults, cross_entropy_sum, positions_within, token_ids

EXTRA = 2
"""What targets hold after their ids: where the rejected answer begins, and the reference's difference (its bits)."""


class Preference(TaskDefaults):
    """Preference pairs: the chosen answer against the rejected one (DPO)."""

    name = "preference"
    separate = True

    def __init__(self, settings: PreferenceSettings) -> None:
        self.settings = settings
        self.reference: dict[str, np.ndarray] = {}
        """log q(chosen) - log q(rejected) of each pair, by split; empty while the reference is measured."""

    def batch(self, dataset: PreparedDataset, split: str, indices: np.ndarray, seeds: list[int]) -> Batch:
        ids = token_ids(dataset, split, indices)
        marks = torch.from_numpy(np.array(dataset.marks(split)[indices]))
        starts = marks & START != 0
        targets = torch.full((len(ids), ids.shape[1] + EXTRA), IGNORED)
        borne = (marks & (LOSS | START)) == LOSS
        targets[:, : ids.shape[1] - 1] = torch.where(borne[:, 1:], ids[:, 1:], IGNORED)
        second = (starts.long().cumsum(1) >= 2).long().argmax(1)
        targets[:, -EXTRA] = second
        found = self.reference.get(split)
        difference = np.zeros(len(ids)) if found is None else found[indices]
        targets[:, -1] = torch.from_numpy(difference.astype(np.float64).view(np.int64).copy())
        return Batch(inputs={"input_ids": ids, "position_ids": positions_within(starts)}, targets=targets, by_row=EXTRA)

    def loss_sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum over pairs of the loss; while the reference is measured, each pair's difference instead."""
        if targets.shape[1] == logits.shape[1]:  # the trial that documents are kept apart
            return cross_entropy_sum(logits, targets)
        difference = self.difference(logits, targets)
        if not self.reference:
            return difference
        present = targets[:, -EXTRA] != IGNORED
        reference = targets[:, -1].contiguous().view(torch.float64).to(difference.dtype)
        margin = self.settings.beta * (difference - reference.where(present, 0.0))
        smoothing = self.settings.label_smoothing
        loss = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
        return (loss * present).sum()

    @staticmethod
    def difference(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """log p(chosen) - log p(rejected) of every pair, in float32."""
        labels, second = targets[:, :-EXTRA], targets[:, -EXTRA]
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), labels.reshape(-1), ignore_index=IGNORED, reduction="none"
        ).view(labels.shape)
        sign = torch.where(torch.arange(labels.shape[1], device=labels.device) < second[:, None], -1.0, 1.0)
        return (losses * sign).sum(1)
