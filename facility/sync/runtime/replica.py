"""What every synchronisation policy between replicas shares; the files of `facility.sync.policies` override some.

The connection to the scheduler of groups, the process groups for exchange, counts of steps and samples, and the exact
average with which all replicas of a facility end a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from facility.exchange.messages.sync import SyncSettings
from facility.sync.protocol import ReplicaRank
from facility.sync.runtime.buckets import bucket_runs, ring_bytes
from facility.sync.runtime.client import Decision, SchedulerClient
from facility.sync.runtime.flat import Flat, begin_state, optimizer_moments, set_to_zero
from facility.sync.runtime.process_groups import Channel, Channels, ExchangeFailed
from facility.sync.runtime.scheduler_process import SchedulerPlan, SchedulerProcess, SchedulerThread

EXACT_ELEMENTS = 4_000_000
"""Elements averaged at once in float64: what the final average needs beside two copies of the parameters."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """All that a policy is built from."""

    settings: SyncSettings
    place: ReplicaRank
    parameters: list[torch.Tensor]
    """This rank's trained parameters, float32: plain, or DTensors of which the local shard is taken; the same shapes on
    the same position of every replica. Their `grad` is what `reduce_gradients` exchanges."""
    steps: int
    """Steps that one replica is to make; all make `steps * replicas` together where progress is accumulated."""
    done: int = 0
    """Of `steps`, those that this replica made before a pause."""
    samples: float = 0.0
    """Samples that it saw in them."""
    store: dist.Store
    """Where the ranks exchange addresses; all reach it (TCPStore)."""
    optimizer: torch.optim.Optimizer | None = None
    backwards_per_step: int = 1
    """Backward passes whose gradients accumulate into one step, so that exchange can start during the last one."""
    device: torch.device = torch.device("cpu")
    address: str = "127.0.0.1"
    """This node's address, on which the scheduler and peers listen."""
    log: Path | None = None
    """Directory for `groups.jsonl` and `trace.json` (first rank only); None: no files."""
    outlives: bool = False
    """The scheduler is a process of its own, which outlives the rank that starts it."""


class Replica:
    """One rank under a policy; policies override what differs."""

    def __init__(self, context: Context) -> None:
        self.context, self.settings, self.place = context, context.settings, context.place
        self.accumulated = self.settings.accumulated
        """True if updates of all replicas are counted together."""
        self.scheduler: SchedulerProcess | SchedulerThread | None = None
        if self.place.chief:
            plan = SchedulerPlan(
                settings=self.settings,
                replicas=self.place.replicas,
                positions=self.place.positions,
                steps=context.steps,
                address=context.address,
                log=context.log,
            )
            self.scheduler = SchedulerProcess(plan) if context.outlives else SchedulerThread(plan)
            context.store.set("scheduler", self.scheduler.contact)
        self.flat = Flat(context.parameters, context.device)
        self.prepare()
        # Before the others are met: from then on the rank that serves the store may die, and they go on.
        self.channels = Channels(context.store, self.place.position, context.device, self.settings.timeout_seconds)
        self.link = SchedulerClient(
            context.store,
            self.settings,
            self.place,
            rounds=self.rounds(context.done),
            told=(context.done, context.samples),
        )
        self.done = max(context.done, self.link.begin.done)
        self.samples = context.samples
        self.updates, self.stopped = self.link.begin.updates, self.link.begin.stop
        self.wait_seconds = self.exchange_seconds = 0.0
        self.bytes = 0
        self._buffer: torch.Tensor | None = None
        self._finished: tuple[int, ...] = ()
        """Members of the final group, once it has met."""

    # -- what policies override -------------------------------------------------------------------------------------
    def prepare(self) -> None:
        """Called before the first contact with the others."""

    def before_final(self) -> None:
        """Called when all have finished, before the exact average or the pause."""

    def rounds(self, steps: int) -> int:
        """How often the scheduler has heard of a replica that made so many steps."""
        return steps

    # -- the protocol -----------------------------------------------------------------------------------------------
    def wants_more(self) -> bool:
        return not self.stopped if self.accumulated else self.done < self.context.steps

    @property
    def remaining(self) -> int | None:
        """Steps still to be made here; None where all replicas' updates are counted together."""
        return None if self.accumulated else self.context.steps - self.done

    @property
    def progress(self) -> float:
        return self.updates / self.place.replicas if self.accumulated else float(self.done)

    @property
    def step_scale(self) -> float:
        return 1.0

    @property
    def pausing(self) -> bool:
        return self.link.pausing

    @property
    def members(self) -> tuple[int, ...]:
        return self._finished or self.link.present

    def ask_to_pause(self) -> None:
        self.link.ask_to_pause()

    def before_step(self, samples: float) -> None:
        pass

    def reduce_gradients(self, samples: float) -> None:
        pass

    def after_step(self, samples: float) -> None:
        self.count(samples)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        assert not state, f"{self.settings.policy} keeps nothing between rounds"

    def finish(self) -> bool:
        while True:
            decision = self.ask("finish")
            self.before_final()
            if decision.pause:
                self.link.report(decision, ok=True, seconds=0.0, sent=0)
                self._finished = tuple(sorted(decision.members))
                return False
            self._buffer = None  # of the last mean: as large as what follows
            result = torch.empty(self.flat.size, dtype=torch.float32, device=self.context.device)

            def exact(channel: Channel, decision: Decision = decision, result: torch.Tensor = result) -> int:
                return self._exact_mean(channel, decision, result)

            if self.exchange(decision, exact, vote=True):
                if len(decision.members) > 1:
                    self.flat.unpack(result)
                self._finished = tuple(sorted(decision.members))
                return True

    def report(self) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "policy": self.settings.policy,
            "replicas": self.place.replicas,
            "updates_here": self.done,
            "samples_here": self.samples,
            "wait_seconds_here": round(self.wait_seconds, 4),
            "exchange_seconds_here": round(self.exchange_seconds, 4),
            "bytes_here": self.bytes,
            "process_groups_here": self.channels.built,
        }
        if self.place.position == 0 and self.me == self.members[0]:
            figures |= self.link.summary()
        return figures

    def close(self) -> None:
        self.link.close()
        if self.scheduler is not None:
            self.scheduler.stop()
        self.channels.close()

    # -- what policies use ------------------------------------------------------------------------------------------
    @property
    def me(self) -> int:
        return self.place.replica

    def count(self, samples: float) -> None:
        self.done += 1
        self.samples += samples
        self.link.updates, self.link.samples = self.done, self.samples

    def ask(self, kind: str) -> Decision:
        """Announce this replica and wait for its group."""
        begin = time.monotonic()
        decision = self.link.ask(kind)
        self.wait_seconds += time.monotonic() - begin
        self.updates, self.stopped = decision.updates, decision.stop
        self.channels.evict(self.link.take_evictions())
        return decision

    def weight(self, decision: Decision) -> float:
        """This replica's share in the group's mean, as the scheduler says."""
        return decision.weights[decision.members.index(self.me)]

    def channel(self, decision: Decision) -> Channel:
        """The group's process group. Raises `ExchangeFailed`."""
        return self.channels.get(decision.channel, decision.members, self.me, lambda: self.link.called_off(decision))

    def exchange(
        self,
        decision: Decision,
        action: Callable[[Channel], int],
        *,
        vote: bool,
        begun: float | None = None,
        sent: int = 0,
        relayed: bool = False,
    ) -> bool:
        """Carry out a group's exchange; True when it took place (with `vote`: on every rank of the group).

        `action` gets the process group and returns the bytes this rank sent; a group of one has nothing to do. `begun`
        (monotonic seconds) and `sent` (bytes) are of what belongs to the exchange and came before; `relayed` as for
        `SchedulerClient.report`.
        """
        begin, why = time.monotonic() if begun is None else begun, ""
        try:
            if len(decision.members) > 1:
                sent += action(self.channel(decision))
        except ExchangeFailed as error:
            why = str(error)
            self.spoiled(decision)
        seconds = time.monotonic() - begin
        self.exchange_seconds += seconds
        self.bytes += sent
        if not vote:
            self.link.report(decision, ok=not why, seconds=seconds, sent=sent, why=why, relayed=relayed)
            return not why
        took_place, _ = self.link.vote(decision, ok=not why, seconds=seconds, sent=sent, why=why)
        if not took_place:
            self.spoiled(decision)
        return took_place

    def spoiled(self, decision: Decision) -> None:
        """An exchange failed: its process group and its buffer (still in use, perhaps) are never touched again."""
        self.channels.discard(decision.channel)
        self._buffer = None

    def share(self, channel: Channel, amount: float) -> float:
        """`amount` of this member over the sum of all members'."""
        total = torch.tensor([amount], dtype=torch.float64, device=self.context.device)
        channel.all_reduce(total)
        return amount / total.item()

    def mean(self, channel: Channel, shares: float | list[float], flat: Flat) -> torch.Tensor:
        """Mean of `flat` over the group, by this member's share (or one for each tensor).

        It is in a buffer that the next call overwrites.
        """
        if self._buffer is None or self._buffer.numel() < flat.size:
            self._buffer = torch.empty(flat.size, dtype=torch.float32, device=self.context.device)
        buffer = flat.pack(self._buffer[: flat.size])
        if isinstance(shares, list):
            flat.scale(buffer, shares)
        else:
            buffer.mul_(shares)
        channel.all_reduce(buffer)
        return buffer

    def averaged(self, decision: Decision, *, vote: bool, amount: float | None = None) -> bool:
        """Average parameters (and moments, by the stated policy) over the group; False: nothing has changed.

        Weights are the scheduler's, or `amount` of each member over the sum of all (samples, say).
        """
        if decision.returning:
            begin_state(self.context.optimizer)
        state = optimizer_moments(self.context.optimizer)
        both = [*self.flat.tensors, *state] if self.settings.state_policy == "average" else self.flat.tensors
        flat = Flat(both, self.context.device)
        box: list[torch.Tensor] = []

        def action(channel: Channel) -> int:
            share = self.weight(decision) if amount is None else self.share(channel, amount)
            box.append(self.mean(channel, share, flat))
            return ring_bytes(flat.bytes, len(decision.members))

        if not self.exchange(decision, action, vote=vote):
            return False
        if box:
            flat.unpack(box[0])
            if self.settings.state_policy == "reset":
                set_to_zero(state)
        return True

    def average(self, channel: Channel, decision: Decision, shares: Iterable[tuple[float, list[torch.Tensor]]]) -> int:
        """Average tensors over the group, each list by this member's share in it, with the memory of one bucket.

        Returns bytes sent. When it fails, some are averaged while others are as they were.
        """
        shared = [(share, tensor) for share, tensors in shares for tensor in tensors]
        factors = iter([share for share, _ in shared])
        sent = 0
        for run in bucket_runs([tensor for _, tensor in shared], self.settings.bucket_bytes):
            flat = Flat(run, self.context.device)
            flat.unpack(self.mean(channel, [next(factors) for _ in run], flat))
            sent += ring_bytes(flat.bytes, len(decision.members))
        return sent

    def _exact_mean(self, channel: Channel, decision: Decision, result: torch.Tensor) -> int:
        """Fill `result` with the mean of all up to date, summed in float64, rounded once: everywhere the same bits."""
        counts = sum(1 for w in decision.weights if w > 0)
        factor = 1.0 if self.weight(decision) > 0 else 0.0
        for piece in self.flat.pack(result).split(EXACT_ELEMENTS):
            wide = piece.double().mul_(factor)
            channel.all_reduce(wide)
            piece.copy_(wide.div_(counts))
        return ring_bytes(2 * self.flat.bytes, len(decision.members))
