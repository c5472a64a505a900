"""Partial reduce: average in small groups that form as replicas become ready.

Miao et al., "Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce", SIGMOD 2021, and "SDPipe",
PVLDB 16(9), 2023: a local step, then X <- X W with W averaging inside the group. Who averages with whom is the pure
scheduler's decision (`facility.exchange.groups`), which also debiases and keeps the whole connected.

For plain SGD it makes no difference whether members average parameters after their steps, or parameters and gradients
before a step that is then the same for all. For AdamW it does: a step along one replica's noisy gradient is not a share
of the step of all. So by default (`step: common`) a group meets before the optimizer's step. Members that meet for the
second time in a row, with nobody else, average their moments too; from the third time on they hold the same parameters
and moments and exchange gradients only: as long as everybody comes, this is all-reduce, in cost and in result.
`step: own` is what the papers do.

Debiasing: with a common step parameters are averaged alike, so that the mean over all replicas does not move by
averaging; a member that makes few updates weighs more in the gradient, and the step is as long as its members'
influence. (Weighing its parameters too would draw the others back to where it was some steps ago.) With `step: own`
the weights are those of the parameters, for want of anything else.

`relay`: a step along one replica's gradient is noisy, and waiting for more is what nobody wants. So a group of whose
members none was in the group before takes that one's gradient along, as if one member more had come, and who would go
on alone also averages parameters with a member of it, as in AD-PSGD (`relay.Shelf`). Nobody waits: the other computes
meanwhile and takes its half of the difference at its next group.

`AdPsgdBlocking` is the papers' exchange between pairs that wait for each other (SDPipe's baseline).
"""

from __future__ import annotations

import logging
import time

import torch

from facility.exchange.gossip import PairScheduler
from facility.exchange.groups import GroupRules, GroupScheduler

from .flat import Flat, begin_state, gradients, moments, zero
from .link import Decision
from .process_groups import ExchangeFailed
from .relay import Shelf
from .replica import Context, Replica

log = logging.getLogger("facility.sync")


class PartialReduce(Replica):
    """One group per update. A group that fails leaves its survivors with what they hold; they go on.

    What a failed exchange has averaged before it failed stays averaged: parameters, moments and gradients of each are
    sound, and members that were in a failed group send everything again when they meet.
    """

    accumulated = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._stepping = False
        self._influence = 1.0
        if context.settings.common_step:
            # Now: later, in a pipeline that never flushes, autograd holds forward passes on these parameters.
            begin_state(context.optimizer)

    def scheduler(self, budget: int) -> GroupScheduler:
        return GroupScheduler(rules=self._rules(budget))

    def _rules(self, budget: int = 0) -> GroupRules:
        # Stages that never flush have an exchange on the way of every gradient; and their weights are stashed.
        return self.settings.rules(budget=budget, relay=not self.context.endless)

    def prepare(self) -> None:
        self._shelf = Shelf(self.context, self.flat) if self._rules().relay else None

    @property
    def progress(self) -> float:
        # Between its group and the end of its step a replica counts as the group does, without this step: so all of a
        # group's members step at the same learning rate.
        return max(0.0, super().progress - float(self._stepping))

    @property
    def influence(self) -> float:
        return self._influence

    def reduce_gradients(self, samples: float) -> None:
        if not self.settings.common_step:
            return
        self._stepping = True
        self.count(samples)
        decision = self.ask("ready")
        begun, sent = time.monotonic(), 0
        self._influence = decision.influence
        if self._shelf is not None:
            self._shelf.take_back(self.flat)
        kept, state = self.settings.state_policy, moments(self.context.optimizer)
        alike: list[torch.Tensor] = []
        if kept != "average" or decision.together < 3:
            alike += self.flat.tensors
        if kept == "average" and decision.together == 2:
            alike += state
        mine, share = gradients(self.context.parameters), self.weight(decision)
        if decision.partner is not None:
            share, sent = self._relayed(decision, mine)
        shares = ((share, mine), (decision.share(self.me), alike))
        averaged = self.averaged_in_buckets(decision, shares, begun=begun, sent=sent)
        if self._shelf is not None and averaged and self.me == decision.keeper:
            self._shelf.put(decision.uid, self.flat, mine)
        if averaged and kept == "reset" and len(decision.members) > 1:
            zero(state)

    def _relayed(self, decision: Decision, mine: list[torch.Tensor]) -> tuple[float, int]:
        """Take an earlier group's gradient along: this member's share in the gradient, bytes sent.

        The first member fetches it and lets it travel with its own gradient `mine`; where it is gone, its own stands in.
        """
        assert self._shelf is not None and decision.partner is not None
        members, weight, sent = len(decision.members), self.weight(decision), 0
        if self.me != decision.members[0]:
            return weight * members / (members + 1), 0
        try:
            left, sent = self._shelf.fetch(decision.partner, decision.after, self.flat, swap=members == 1)
        except ExchangeFailed as error:
            log.info("group %d goes without what %d keeps: %s", decision.uid, decision.partner, error)
            left = None
        if left is not None:
            flat = Flat(mine, self.context.device)
            flat.unpack(flat.pack().mul_(weight * members).add_(left).div_(weight * members + 1))
        return (weight * members + 1) / (members + 1), sent

    def after_step(self, samples: float) -> None:
        if self.settings.common_step:
            self._stepping = False
            return
        self.count(samples)
        self.averaged(self.ask("ready"), vote=False)

    def before_final(self) -> None:
        if self._shelf is not None:
            self._shelf.take_back(self.flat)

    def close(self) -> None:
        super().close()
        if self._shelf is not None:
            self._shelf.close()


class AdPsgdBlocking(PartialReduce):
    """In iteration k everybody waits for its partner of iteration k."""

    accumulated = False

    def scheduler(self, budget: int) -> GroupScheduler:
        return PairScheduler(rules=GroupRules(debias=False), seed=self.settings.emulation.seed)
