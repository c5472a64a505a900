"""Partial reduce: average parameters in small groups that form as replicas become ready.

Miao et al., "Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce", SIGMOD 2021, and "SDPipe",
PVLDB 16(9), 2023: a local step, then X <- X W with W averaging inside the group. Who averages with whom is the pure
scheduler's decision (`facility.exchange.groups`), which also debiases and keeps the whole connected.

`AdPsgdBlocking` is the same exchange between pairs that wait for each other (SDPipe's baseline).
"""

from __future__ import annotations

from facility.exchange.gossip import PairScheduler
from facility.exchange.groups import GroupRules, GroupScheduler

from .replica import Replica


class PartialReduce(Replica):
    """One group per update. A group that fails leaves its survivors with their own parameters; they go on."""

    accumulated = True

    def scheduler(self, budget: int) -> GroupScheduler:
        return GroupScheduler(rules=self.settings.rules(budget=budget))

    def after_step(self, samples: float) -> None:
        self.count(samples)
        self.averaged(self.ask("ready"), vote=False)


class AdPsgdBlocking(PartialReduce):
    """In iteration k everybody waits for its partner of iteration k."""

    accumulated = False

    def scheduler(self, budget: int) -> GroupScheduler:
        return PairScheduler(rules=GroupRules(debias=False), seed=self.settings.emulation.seed)
