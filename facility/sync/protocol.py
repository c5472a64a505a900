"""What the trainer sees of synchronisation: one protocol, whatever the policy.

The trainer's loop:

    sync = connect(Context(settings=settings.sync, place=..., parameters=..., optimizer=..., store=..., steps=...))
    while sync.wants_more():
        sync.before_step(samples)           # optional: exchange may start during the last backward pass
        ... forward and backward passes (gradients are the mean over this replica's own samples) ...
        sync.reduce_gradients(samples)      # before clipping
        ... clip, optimizer.step() at the learning rate times sync.step_scale ...
        sync.after_step(samples)
        if no_time_is_left: sync.ask_to_pause()
        if sync.pausing: break
    if not sync.finish(): ...               # paused: save what each replica holds, go on with `done` later
    # otherwise there was one exact average over all replicas: export
    details["sync"] = sync.report()
    sync.close()

Every rank of a replica calls every method, in the same order; rank p of a replica synchronises with rank p of other
replicas, and with whom is decided once per replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class ReplicaRank:
    """This rank's place among the replicas."""

    replica: int
    replicas: int
    position: int = 0
    """This rank among those of its replica: shard or stage, the same parameters at the same position everywhere."""
    positions: int = 1

    @property
    def chief(self) -> bool:
        """True if this rank hosts the scheduler."""
        return self.replica == 0 and self.position == 0


class Synchroniser(Protocol):
    """A policy at work on one rank."""

    def wants_more(self) -> bool:
        """True if another step is wanted of this replica; the same on every rank of the replica."""

    @property
    def remaining(self) -> int | None:
        """Steps still to be made here; None where the updates of all replicas are counted together."""

    @property
    def progress(self) -> float:
        """Steps done so far on average over the replicas: what a learning-rate schedule follows."""

    @property
    def step_scale(self) -> float:
        """How many times as long the step is to be whose gradients were exchanged last: multiplies its learning rate.

        Other than 1 where replicas that make few updates are debiased.
        """

    @property
    def done(self) -> int:
        """Steps made here, those before a pause included."""

    @property
    def samples(self) -> float:
        """Samples of those steps."""

    @property
    def pausing(self) -> bool:
        """True once a pause of this replica is pending; the same on every rank of the replica."""

    @property
    def members(self) -> tuple[int, ...]:
        """Replicas that are here, ascending; after `finish` those of the final average, the same on each of them."""

    def ask_to_pause(self) -> None:
        """Any rank may ask; every replica then pauses at its next exchange (all at the same step where they exchange
        in step)."""

    def before_step(self, samples: float) -> None:
        """A step of `samples` samples begins: exchange of gradients may start during its last backward pass."""

    def reduce_gradients(self, samples: float) -> None:
        """Exchange gradients where the policy does; `samples` (or tokens) is this replica's weight in the mean."""

    def after_step(self, samples: float) -> None:
        """Exchange parameters where the policy does; called after the optimizer's step."""

    def finish(self) -> bool:
        """Wait for all replicas and take the exact mean of their parameters, the same bits everywhere.

        False: a pause was asked for. Nothing is under way between replicas, and each keeps its own parameters.
        """

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The policy's state between rounds (DiLoCo's outer momentum), as flat vectors over the parameters, by name."""

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Put back what `state_dict` gave."""

    def report(self) -> dict[str, Any]:
        """Figures of the round for `report.json`; those of all replicas on the first rank of the first member only."""

    def close(self) -> None:
        """Leave: threads, sockets and process groups are gone afterwards."""
