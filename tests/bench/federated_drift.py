"""Corrections within a facility's round that cost no byte: each follows from models that the facility has anyway.

`control`: SCAFFOLD's control variates (Karimireddy et al. 2020, arXiv 1910.06378, option II) on AdamW's steps in place
of gradients. With a_i the way that facility i walked by itself in the last round and a their weighted mean, both
divided by the sum of the learning rates, every step of learning rate r adds r (a - a_i). The corrections sum to zero
over the facilities, so the mean is not biased; the facilities walk closer together. The product's `drift_correction` is
this (`as_sent`: with what the rounding of updates and of the mean walk does to it).

`along`: momentum of the global model, walked evenly within the round instead of after it, so that gradients are taken
where the momentum leads (FedCM: Xu et al. 2021, arXiv 2106.10874). It takes the place of the server optimizer's; it
grows with the rounds as that of `nesterov` does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from coordinator.aggregation.server_optimizers.nesterov import momentum_of
from facility.exchange.checkpoints import mean_walk
from tests.bench.federated_learner import Learner, Local, rounded


class Drift:
    """What facilities and the global model walked in the last round."""

    def __init__(self, local: Local) -> None:
        self.local = local
        self.own: dict[str, list[Tensor]] = {}
        self.mean: list[Tensor] = []
        self.common: list[Tensor] = []

    @property
    def on(self) -> bool:
        return bool(self.local.along or self.local.control)

    def begin(self, who: str, learner: Learner, round: int) -> None:
        """Set the shift of a facility's round."""
        shift = [torch.zeros_like(value.detach().cpu()) for value in learner.parameters]
        if self.local.along and self.common:
            for value, way in zip(shift, self.common, strict=True):
                value.add_(way, alpha=momentum_of(round, self.local.along))
        if self.local.control and who in self.own:
            for value, mean, own in zip(shift, self.mean, self.own[who], strict=True):
                value.add_(mean - own, alpha=self.local.control)
        learner.shift = [value.to(learner.device) for value in shift]

    def end(self, start: list[Tensor], learners: Mapping[str, Learner], weights: Mapping[str, float]) -> None:
        """Take over what the facilities of this round walked by themselves from `start`."""
        for who in weights:
            learner = learners[who]
            ends = [value.detach().cpu() for value in learner.parameters]
            self.own[who] = [
                (value - begin) / learner.rates - shift.cpu()
                for value, begin, shift in zip(
                    rounded(ends) if self.local.as_sent else ends, start, learner.shift, strict=True
                )
            ]
        total = sum(weights.values())
        self.mean = [
            torch.stack([self.own[who][number] * (weight / total) for who, weight in weights.items()]).sum(0)
            for number in range(len(start))
        ]
        if self.local.as_sent:
            self.mean = [
                torch.from_numpy(mean_walk.byte_values()[mean_walk.round_to_bytes(one.numpy())]) for one in self.mean
            ]

    def moved(self, before: list[Tensor], after: list[Tensor], rates: float) -> None:
        """Take over where the global model went; `rates`: the sum of learning rates of a facility's round."""
        self.common = [(new - old) / rates for old, new in zip(before, after, strict=True)]
