"""Local steps, then an outer step: the mean of the replicas' changes is an outer gradient for Nesterov's momentum.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023 (arXiv 2311.08105),
Algorithm 1.
"""

from __future__ import annotations

import torch

from facility.exchange.scheduling.policies import SyncPolicy
from facility.sync.policies.local import Local
from facility.sync.runtime.buckets import ring_bytes
from facility.sync.runtime.client import Decision
from facility.sync.runtime.process_groups import Channel
from facility.sync.runtime.replica import Context

DECLARATION = SyncPolicy(
    name="diloco",
    summary="the same as local with an outer Nesterov step",
    citation="Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, "
    "2023 (arXiv 2311.08105)",
    implementation="DiLoCo",
    vectors=3.0,
    parameters=("every", "outer_learning_rate", "outer_momentum", "weights"),
    periodic=True,
    synchronous=True,
)

PIECE = 1 << 20
"""Values of a vector that are worked on at once."""


class DiLoCo(Local):
    """The mean becomes an outer gradient. Outer parameters and momentum are the same bits on every replica."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._outer = self.flat.pack()
        self._momentum = torch.zeros_like(self._outer)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"momentum": self._momentum}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._momentum.copy_(state["momentum"])

    def _meet(self, decision: Decision) -> bool:
        amount = self._amount(decision)
        brought: list[torch.Tensor] = []
        means: list[torch.Tensor] = []

        def action(channel: Channel) -> int:
            sent = ring_bytes(self.flat.bytes, len(decision.members))
            if decision.returning:
                both = torch.cat([self._outer, self._momentum])
                root = next(i for i, m in enumerate(decision.members) if m not in decision.returning)
                channel.broadcast(both, root)
                sent += both.numel() * 4
                brought.append(both)
            means.append(self.mean(channel, self.share(channel, amount), self.flat))
            return sent

        if not self.exchange(decision, action, vote=True):
            return False
        for both in brought:
            for own, common in zip((self._outer, self._momentum), both.split(self.flat.size), strict=True):
                own.copy_(common)
        self._step(means[0] if means else self.flat.pack())
        return True

    def _step(self, mean: torch.Tensor) -> None:
        """The outer step from the replicas' mean, piece by piece: vectors of a model's size are memory."""
        rate, decay = self.settings.outer_learning_rate, self.settings.outer_momentum
        pieces = (vector.split(PIECE) for vector in (self._outer, self._momentum, mean))
        for outer, momentum, theirs in zip(*pieces, strict=True):
            gradient = outer - theirs
            momentum.mul_(decay).add_(gradient)
            outer.sub_(rate * (gradient + decay * momentum))
        self.flat.unpack(self._outer)
