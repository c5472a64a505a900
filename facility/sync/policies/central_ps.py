"""Gradients are reduced to one replica and the mean is sent back.

The `central_ps` mode of Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments",
NeurIPS 2022 (arXiv 2206.01288).
"""

from __future__ import annotations

import torch

from facility.exchange.scheduling.policies import SyncPolicy
from facility.sync.runtime.client import Decision
from facility.sync.runtime.flat import Flat
from facility.sync.runtime.lockstep import Lockstep, weighted_by_samples
from facility.sync.runtime.process_groups import Channel

DECLARATION = SyncPolicy(
    name="central_ps",
    summary="gradients every step, in lockstep, through one replica",
    citation="Yuan et al., Decentralized Training of Foundation Models in Heterogeneous Environments, "
    "NeurIPS 2022 (arXiv 2206.01288)",
    implementation="CentralServer",
    parameters=("weights",),
    lockstep=True,
    synchronous=True,
    exchange="central",
)


class CentralServer(Lockstep):
    """Gradients are reduced to one replica and the mean is sent back (DT-FM's `central_ps`)."""

    def summed(
        self, channel: Channel, decision: Decision, flat: Flat, samples: float
    ) -> tuple[list[torch.Tensor], int]:
        vector = weighted_by_samples(flat, samples)
        channel.reduce(vector, 0)
        channel.broadcast(vector, 0)
        here = decision.members[0] == self.me
        return [vector], flat.bytes * (len(decision.members) - 1 if here else 1)
