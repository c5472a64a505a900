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

`AdPsgdBlocking` is the papers' exchange between pairs that wait for each other (SDPipe's baseline).
"""

from __future__ import annotations

import torch

from facility.exchange.gossip import PairScheduler
from facility.exchange.groups import GroupRules, GroupScheduler

from .flat import begin_state, gradients, moments, zero
from .replica import Context, Replica


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
        return GroupScheduler(rules=self.settings.rules(budget=budget))

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
        self._influence = decision.influence
        kept, state = self.settings.state_policy, moments(self.context.optimizer)
        alike: list[torch.Tensor] = []
        if kept != "average" or decision.together < 3:
            alike += self.flat.tensors
        if kept == "average" and decision.together == 2:
            alike += state
        shares = ((self.weight(decision), gradients(self.context.parameters)), (decision.share(self.me), alike))
        if self.averaged_in_buckets(decision, shares) and kept == "reset" and len(decision.members) > 1:
            zero(state)

    def after_step(self, samples: float) -> None:
        if self.settings.common_step:
            self._stepping = False
            return
        self.count(samples)
        self.averaged(self.ask("ready"), vote=False)


class AdPsgdBlocking(PartialReduce):
    """In iteration k everybody waits for its partner of iteration k."""

    accumulated = False

    def scheduler(self, budget: int) -> GroupScheduler:
        return PairScheduler(rules=GroupRules(debias=False), seed=self.settings.emulation.seed)
