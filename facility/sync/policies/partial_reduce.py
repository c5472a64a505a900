"""Partial reduce: average in small groups that form as replicas become ready.

Miao et al., "Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce", SIGMOD 2021, and "SDPipe",
PVLDB 16(9), 2023: a local step, then X <- X W with W averaging inside the group. Group membership is the pure
scheduler's decision (`facility.exchange.scheduling.groups`), which also debiases and keeps the whole connected.

For plain SGD it makes no difference whether members average parameters after their steps, or parameters and gradients
before a step that is then the same for all. For AdamW it does: a step along one replica's noisy gradient is not a share
of the step of all. So by default (`step: common`) a group meets before the optimizer's step. Members that meet for the
second time in a row, with no other member, average their moments too; from the third time on they hold the same
parameters and moments and exchange gradients only: as long as all come, this is all-reduce, in cost and in result.
`step: own` is what the papers do.

Debiasing: with a common step parameters are averaged alike, so that the mean over all replicas does not move by
averaging; a member that makes few updates weighs more in the gradient, and the step is as long as its members'
scale. (Weighing its parameters too would draw the others back to where it was some steps ago.) With `step: own`
the weights are those of the parameters, for want of anything else.

A replica announces itself when its first gradients are final, and they are sent while the backward pass computes the
others (as SDPipe asks for a group at the first exchange of the backward pass). Parameters wait for its end.

`relay`: a step along one replica's gradient is noisy, and waiting for more costs time. So a group that
shares no member with the group before adds that group's gradient, as if it had one member more, and a replica that
would proceed alone also averages parameters with a member of it, as in AD-PSGD (`stale_gradients.StaleGradientCache`).
Neither waits: the other computes meanwhile and takes its half of the difference at its next group.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from facility.exchange.scheduling.policies import SyncPolicy
from facility.sync.runtime.client import Decision
from facility.sync.runtime.flat import begin_state, local_gradients, optimizer_moments, set_to_zero
from facility.sync.runtime.gradient_buckets import BackgroundTask, GradientBuckets
from facility.sync.runtime.process_groups import Channel, ExchangeFailed
from facility.sync.runtime.replica import Context, Replica
from facility.sync.runtime.stale_gradients import StaleGradientCache

DECLARATION = SyncPolicy(
    name="partial_reduce",
    summary="average in small groups that form as replicas become ready",
    citation="Miao et al., Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce, SIGMOD 2021; "
    "SDPipe, PVLDB 16(9), 2023",
    implementation="PartialReduce",
    vectors=5.0,
    parameters=(
        "bound",
        "minimum",
        "maximum",
        "patience",
        "window_seconds",
        "window_maximum_seconds",
        "debias",
        "step",
        "relay",
        "optimizer_state",
        "progress",
        "bucket_bytes",
    ),
    accumulated=True,
    common_steps=True,
    planned=True,
    scheduler="facility.exchange.scheduling.policies:groups",
)

log = logging.getLogger("facility.sync")


class PartialReduce(Replica):
    """One group per update. A group that fails leaves its survivors with what they hold; they go on.

    What a failed exchange has averaged before it failed stays averaged: parameters, moments and gradients of each are
    sound, and members that were in a failed group send everything again when they meet.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._stepping = False
        self._step_scale = 1.0
        self._filling: GradientBuckets | None = None
        self._meeting: BackgroundTask | None = None
        self.early = 0
        """Steps announced while the backward pass went on."""
        if context.settings.common_step:
            self._filling = GradientBuckets(context.parameters, self.settings.bucket_bytes, context.backwards_per_step)
            # Now: later, in a pipeline that never flushes, autograd holds forward passes on these parameters.
            begin_state(context.optimizer)

    def prepare(self) -> None:
        self._shelf = StaleGradientCache(self.context, self.flat) if self.settings.rules().relay else None

    @property
    def progress(self) -> float:
        # Between its group and the end of its step a replica counts as the group does, without this step: so all of a
        # group's members step at the same learning rate.
        return max(0.0, super().progress - float(self._stepping))

    @property
    def step_scale(self) -> float:
        return self._step_scale

    def before_step(self, samples: float) -> None:
        if self._filling is not None:
            self._filling.begin(lambda: self._begin(samples))

    def reduce_gradients(self, samples: float) -> None:
        if self._filling is None:
            return
        self._filling.over()
        meeting, self._meeting = self._meeting, None
        if meeting is None:
            self._meet(samples, self._filling)
        else:
            meeting.result()

    def _begin(self, samples: float) -> None:
        """Announce this replica while its backward pass goes on."""
        assert self._filling is not None
        self.early += 1
        self._meeting = BackgroundTask(self._meet, samples, self._filling)

    def _meet(self, samples: float, filling: GradientBuckets) -> None:
        """Announce this replica and average with its group, each bucket of gradients as soon as it is final."""
        if self.context.device.type == "cuda":
            torch.cuda.set_device(self.context.device)  # of this thread
        self._stepping = True
        self.count(samples)
        decision = self.ask("ready")
        begun, together = time.monotonic(), len(decision.members) > 1
        self._step_scale = decision.step_scale
        if self._shelf is not None:
            self._shelf.withdraw()
        left, sent = None, 0
        if not together:
            filling.all()
            self._settle()
        if decision.partner is not None and self.me == decision.members[0]:
            left, sent = self._handed_on(decision)
        if not together:
            self._shared(decision, self.context.parameters, left)
        kept = self.settings.state_policy
        alike: list[torch.Tensor] = []
        if kept != "average" or decision.together < 3:
            alike += self.flat.tensors
        if kept == "average" and decision.together == 2:
            alike += optimizer_moments(self.context.optimizer)

        def action(channel: Channel) -> int:
            sent, last = 0, len(filling.buckets) - 1
            for number in range(last):
                sent += self.average(channel, decision, [self._shared(decision, filling.wait(number), left)])
            gradient = self._shared(decision, filling.wait(last), left)
            self._settle()
            return sent + self.average(channel, decision, [gradient, (decision.share(self.me), alike)])

        averaged = self.exchange(decision, action, vote=False, begun=begun, sent=sent, relayed=left is not None)
        filling.all()
        self._settle()  # where the exchange failed
        if averaged and kept == "reset" and together:
            set_to_zero(optimizer_moments(self.context.optimizer))
        others = len(decision.members) < self.place.replicas  # that might take it along
        if self._shelf is not None and averaged and others and self.me == decision.keeper:
            self._shelf.put(decision.uid, self.flat, local_gradients(self.context.parameters))

    def report(self) -> dict[str, Any]:
        return super().report() | {"announced_early_here": self.early}

    def _settle(self) -> None:
        if self._shelf is not None:
            self._shelf.settle(self.flat)

    def _handed_on(self, decision: Decision) -> tuple[dict[int, torch.Tensor] | None, int]:
        """The gradient that an earlier group left, by the parameter's id (None: it is gone), and bytes sent."""
        assert self._shelf is not None and decision.partner is not None
        try:
            swap = len(decision.members) == 1
            left, sent = self._shelf.fetch(decision.partner, decision.after, self.flat, swap=swap)
        except ExchangeFailed as error:
            log.info("group %d goes without what %d keeps: %s", decision.uid, decision.partner, error)
            return None, 0
        if left is None:
            return None, sent
        return dict(zip(map(id, self.context.parameters), self.flat.pieces(left), strict=True)), sent

    def _shared(
        self, decision: Decision, parameters: list[torch.Tensor], left: dict[int, torch.Tensor] | None
    ) -> tuple[float, list[torch.Tensor]]:
        """This member's share in the gradient of these parameters, and what it brings.

        What an earlier group left counts as one member more. It travels with the first member's own gradient, which
        stands in for it where it is gone.
        """
        mine, share, members = local_gradients(parameters), self.weight(decision), len(decision.members)
        if decision.partner is None:
            return share, mine
        if self.me != decision.members[0]:
            return share * members / (members + 1), mine
        if left is not None:
            for parameter, gradient in zip(parameters, mine, strict=True):
                gradient.mul_(share * members).add_(left[id(parameter)]).div_(share * members + 1)
        return (share * members + 1) / (members + 1), mine

    def after_step(self, samples: float) -> None:
        if self.settings.common_step:
            self._stepping = False
            return
        self.count(samples)
        self.averaged(self.ask("ready"), vote=False)

    def before_final(self) -> None:
        if self._shelf is not None:
            self._shelf.withdraw()
        self._settle()

    def close(self) -> None:
        super().close()
        if self._filling is not None:
            self._filling.close()
        if self._shelf is not None:
            self._shelf.close()
