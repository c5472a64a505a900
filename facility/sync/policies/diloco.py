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
    parameters=("every", "outer_learning_rate", "outer_momentum", "weights"),
    periodic=True,
    synchronous=True,
)


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
        result: list[torch.Tensor] = []

        def action(channel: Channel) -> int:
            sent = ring_bytes(self.flat.bytes, len(decision.members))
            both = torch.cat([self._outer, self._momentum])
            if decision.returning:
                root = next(i for i, m in enumerate(decision.members) if m not in decision.returning)
                channel.broadcast(both, root)
                sent += both.numel() * 4
            result.append(both)
            result.append(self.mean(channel, self.share(channel, amount), self.flat))
            return sent

        if not self.exchange(decision, action, vote=True):
            return False
        both, mean = result if result else (torch.cat([self._outer, self._momentum]), self.flat.pack())
        outer, momentum = both.split(self.flat.size)
        rate, decay = self.settings.outer_learning_rate, self.settings.outer_momentum
        gradient = outer - mean
        momentum = momentum * decay + gradient
        self._outer = outer - rate * (gradient + decay * momentum)
        self._momentum = momentum
        self.flat.unpack(self._outer)
        return True
