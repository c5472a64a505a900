"""Every replica is the server of an equal share of the gradient.

The `sharded_ps` mode of Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments",
NeurIPS 2022 (arXiv 2206.01288).
"""

from __future__ import annotations

import torch

from facility.exchange.scheduling.policies import SyncPolicy
from facility.sync.runtime.buckets import ring_bytes
from facility.sync.runtime.client import Decision
from facility.sync.runtime.flat import Flat
from facility.sync.runtime.lockstep import Lockstep, weighted_by_samples
from facility.sync.runtime.process_groups import Channel

DECLARATION = SyncPolicy(
    name="sharded_ps",
    summary="gradients every step, in lockstep, each replica serving a share",
    citation="Yuan et al., Decentralized Training of Foundation Models in Heterogeneous Environments, "
    "NeurIPS 2022 (arXiv 2206.01288)",
    implementation="ShardedServer",
    vectors=3.0,
    parameters=("weights",),
    lockstep=True,
    synchronous=True,
    exchange="sharded",
)


class ShardedServer(Lockstep):
    """Every replica is the server of an equal share of the gradient (DT-FM's `sharded_ps`)."""

    def summed(
        self, channel: Channel, decision: Decision, flat: Flat, samples: float
    ) -> tuple[list[torch.Tensor], int]:
        members = len(decision.members)
        vector = weighted_by_samples(flat, samples)
        size = vector.numel()
        share = -(-size // members)
        padded = torch.zeros(share * members, dtype=torch.float32, device=vector.device)
        padded[:size] = vector
        mine = torch.empty(share, dtype=torch.float32, device=vector.device)
        channel.reduce_scatter(mine, padded)
        channel.all_gather(padded, mine)
        return [padded[:size]], ring_bytes(flat.bytes, members)
