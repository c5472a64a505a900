"""Decentralised parallel SGD in pairs that wait for each other: in iteration k each waits for its partner of k.

The baseline of Miao et al., "SDPipe", PVLDB 16(9), 2023.
"""

from __future__ import annotations

from facility.exchange.scheduling.policies import SyncPolicy
from facility.sync.runtime.replica import Replica

DECLARATION = SyncPolicy(
    name="adpsgd_blocking",
    summary="average after every step in pairs that wait for each other (a baseline)",
    citation="Miao et al., SDPipe, PVLDB 16(9), 2023; "
    "Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018",
    implementation="AdPsgdBlocking",
    parameters=("optimizer_state",),
    scheduler="facility.exchange.scheduling.gossip:pairs",
)


class AdPsgdBlocking(Replica):
    """One pair per update."""

    def after_step(self, samples: float) -> None:
        self.count(samples)
        self.averaged(self.ask("ready"), vote=False)
