"""Simulates replicas under a synchronisation policy: updates per second, and which replicas averaged together.

The decisions are those of the facility's own pure schedulers (`facility.exchange.scheduling.groups` and `gossip`); only
time is simulated. A replica computes a step, announces itself, waits for its group, pays for the exchange, and
continues.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from coordinator.simulation.pipelines.graph import template
from coordinator.simulation.pipelines.iteration import stall_table
from coordinator.simulation.pipelines.layout import Layout
from coordinator.simulation.pipelines.longest import Costs, times
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.emulation import Emulation
from facility.exchange.messages.sync import SyncSettings
from facility.exchange.scheduling.group import Group
from facility.exchange.scheduling.groups import GroupScheduler
from facility.exchange.scheduling.policies import Exchange

Step = Callable[[int, int, float], float]
"""(replica, number of its step, seconds since the start) -> seconds that the step computes."""


@dataclass(frozen=True, kw_only=True)
class ExchangeCosts:
    """What an exchange between replicas takes."""

    parameter_bytes: float = 0.0
    """What one replica sends of itself."""
    bytes_per_second: float = 1e9
    """Bandwidth of one replica's link."""
    latency_seconds: float = 0.0
    """One message from replica to replica."""
    fixed_seconds: float = 0.0
    """Any exchange, besides: packing, launching."""
    relay_seconds: float = 0.0
    """Asking another replica for what its group left, besides."""
    member_seconds: float = 0.0
    """Each member of a group beyond the second adds."""
    decision_seconds: float = 0.0
    """Seconds from a replica's announcement to the news of its group, when that forms at once."""
    new_group_seconds: float = 0.0
    """Building the process group of members that have none in the cache."""
    hidden_seconds: float = 0.0
    """What of a lockstep exchange travels during the backward pass."""
    moments: int = 2
    """The optimizer's state over the parameters (AdamW: 2), where groups average it."""

    def ring(self, members: int, *, volumes: int = 1) -> float:
        """All-reduce of `share` times the parameters in a ring: 2(n - 1) steps of 1/n of the bytes."""
        if members < 2:
            return 0.0
        steps = 2 * (members - 1)
        fixed = self.fixed_seconds + (members - 2) * self.member_seconds
        return fixed + steps * (self.latency_seconds + volumes * self.parameter_bytes / members / self.bytes_per_second)

    def volumes(self, settings: SyncSettings, group: Group) -> int:
        """What a group exchanges over the parameters, as `facility.sync` does."""
        average = settings.state_policy == "average"
        if not settings.common_step:
            return 1 + average * self.moments
        if average and group.together > 2:
            return 1
        return 2 + (self.moments if average and group.together == 2 else 0)

    def relay(self, *, swap: bool) -> float:
        """Fetch a gradient from a replica while it computes, or (`swap`) leave one and fetch parameters too."""
        volumes = 3 if swap else 1
        return self.relay_seconds + 2 * self.latency_seconds + volumes * self.parameter_bytes / self.bytes_per_second

    def message(self) -> float:
        """All parameters, one way."""
        return self.latency_seconds + self.parameter_bytes / self.bytes_per_second

    def lockstep(self, exchange: Exchange, members: int) -> float:
        """One exchange of gradients among all."""
        if members < 2:
            return 0.0
        if exchange == "central":
            return self.fixed_seconds + 2 * (members - 1) * self.message()
        if exchange == "sharded":
            share = self.parameter_bytes / members / self.bytes_per_second
            return self.fixed_seconds + 2 * (members - 1) * (self.latency_seconds + share)
        return max(0.0, self.ring(members) - self.hidden_seconds)


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """What a policy made of the replicas' time."""

    policy: str
    seconds: float
    """Until the final average over all."""
    updates: int
    """Steps of all replicas together."""
    updates_per_second: float
    rounds: tuple[int, ...]
    """Steps of every replica."""
    groups: int
    wait_seconds: float
    """Mean over replicas: announced and waiting for others."""
    exchange_seconds: float
    """Mean over replicas: exchanging."""
    log: tuple[Group, ...] = ()
    """Every group, when asked for."""


ANNOUNCE, PUSH, FINISH = range(3)


@dataclass
class _Replica:
    done: int = 0
    announced: float = 0.0
    waited: float = 0.0
    exchanged: float = 0.0


@dataclass
class _Driver:
    """Moves time on: a heap of replicas that have computed, and the scheduler's wake-up calls."""

    settings: SyncSettings
    scheduler: GroupScheduler
    step: Step
    costs: ExchangeCosts
    steps: int
    replicas: list[_Replica]
    heap: list[tuple[float, int, int, int]] = field(default_factory=list)
    sequence: int = 0
    groups: list[Group] = field(default_factory=list)
    cache: OrderedDict[tuple[object, ...], None] = field(default_factory=OrderedDict)
    server_free: float = 0.0
    end: float | None = None

    @property
    def accumulated(self) -> bool:
        return self.scheduler.rules.budget > 0

    def compute(self, replica: int, now: float) -> None:
        """The steps up to the next announcement."""
        policy, mine = self.settings.declaration, self.replicas[replica]
        count = 1
        if policy.periodic:
            count = self.settings.every
            if not self.accumulated:
                count = min(count, self.steps - mine.done)
        for _ in range(count):
            now += self.step(replica, mine.done, now)
            mine.done += 1
        if policy.exchange == "server":
            self.push(now, replica, PUSH)
        else:
            self.push(now + self.costs.decision_seconds, replica, ANNOUNCE)

    def serve(self, now: float) -> float:
        """One message to or from the server, whose link serves one at a time."""
        self.server_free = max(now, self.server_free) + self.costs.message()
        return self.server_free

    def push(self, at: float, replica: int, what: int) -> None:
        """Remember an event."""
        heapq.heappush(self.heap, (at, self.sequence, replica, what))
        self.sequence += 1

    def run(self) -> float:
        for replica in range(len(self.replicas)):
            self.compute(replica, 0.0)
        while self.end is None:
            wake = self.scheduler.wake
            if wake is not None and (not self.heap or wake <= self.heap[0][0]):
                now = wake
                formed = self.scheduler.tick(now)
            else:
                assert self.heap, "somebody waits for ever"
                now, _, replica, what = heapq.heappop(self.heap)
                if what == PUSH:
                    self.push(self.serve(now) + self.costs.decision_seconds, replica, ANNOUNCE)
                    continue
                self.replicas[replica].announced = now
                formed = self.scheduler.finish(replica, now) if what == FINISH else self.scheduler.ready(replica, now)
            for group in formed:
                self.carry_out(group, now)
        return self.end

    def carry_out(self, group: Group, now: float) -> None:
        """Pay for a group's exchange and send its members on, or to the final average."""
        if group.final:
            self.end = now + self.costs.ring(len(group.members))
            return
        self.groups.append(group)
        end = self.exchange(group, now)
        for replica in map(int, group.members):
            mine = self.replicas[replica]
            mine.waited += now - mine.announced
            mine.exchanged += end - now
            self.scheduler.exchanged(replica, end)
            if group.pairs and group.partner is not None:
                for freed in self.scheduler.relayed(replica, group.partner, now):
                    self.carry_out(freed, now)
            if self.scheduler.stop if self.accumulated else mine.done >= self.steps:
                self.push(end, replica, FINISH)
            else:
                self.compute(replica, end)

    def exchange(self, group: Group, now: float) -> float:
        policy, members = self.settings.declaration, group.members
        if policy.exchange == "server":
            return self.serve(now)
        if policy.exchange == "pair":
            return now + self.costs.fixed_seconds + 2 * self.costs.message() if len(self.replicas) > 1 else now
        if group.partner is not None:
            now += self.costs.relay(swap=group.pairs)
        if len(members) < 2:
            return now
        if policy.lockstep:
            return now + self.costs.lockstep(policy.exchange, len(members))
        key = tuple(members)
        build = 0.0 if key in self.cache else self.costs.new_group_seconds
        self.cache[key] = None
        self.cache.move_to_end(key)
        while len(self.cache) > self.settings.group_cache:
            self.cache.popitem(last=False)
        return now + build + self.costs.ring(len(members), volumes=self.costs.volumes(self.settings, group))


def simulate_policy(
    settings: SyncSettings,
    replicas: int,
    step: Step,
    *,
    steps: int,
    costs: ExchangeCosts | None = None,
    keep_log: bool = False,
) -> PolicyResult:
    """Run `replicas` replicas for `steps` steps each (or as many together) under `settings.policy`."""
    if replicas < 1 or steps < 1:
        raise ConfigurationError(f"replicas={replicas}, steps={steps}, expected 1 or more each")
    scheduler = settings.scheduler(replicas=replicas, steps=steps, members=range(replicas))
    driver = _Driver(
        settings=settings,
        scheduler=scheduler,
        step=step,
        costs=costs or ExchangeCosts(),
        steps=steps,
        replicas=[_Replica() for _ in range(replicas)],
    )
    seconds = driver.run()
    updates = sum(r.done for r in driver.replicas)
    return PolicyResult(
        policy=settings.policy,
        seconds=seconds,
        updates=updates,
        updates_per_second=updates / seconds if seconds else 0.0,
        rounds=tuple(r.done for r in driver.replicas),
        groups=len(driver.groups),
        wait_seconds=sum(r.waited for r in driver.replicas) / replicas,
        exchange_seconds=sum(r.exchanged for r in driver.replicas) / replicas,
        log=tuple(driver.groups) if keep_log else (),
    )


def pipeline_steps(layout: Layout, emulation: Emulation, count: int) -> Step:
    """Steps of replicas that are pipelines: `count` simulated ones of each replica, used again and again."""
    table: NDArray[np.float64] = np.zeros((layout.replicas, count))
    compute, (occupied, latency) = layout.compute_table(), layout.message_tables()

    def stall(replica: int, stage: int, draw: int) -> float:
        return emulation.stall(replica, draw, stage=stage)

    for replica, micro_batches in enumerate(layout.micro_batches):
        graph = template(layout.schedule, layout.stages, layout.virtual_stages, micro_batches, layout.transport)
        cost = Costs(
            compute=compute[:, :, [replica], None] * emulation.factor(replica),
            occupied=occupied[:, :, [replica], None],
            latency=latency[:, :, [replica], None],
            stalls=stall_table(graph, layout, [replica], count, stall),
        )
        table[replica] = times(graph, cost).end.max(axis=0)[0]
    return lambda replica, number, now: float(table[replica, number % count])


def over_allreduce(
    settings: SyncSettings, replicas: int, step: Step, *, steps: int, costs: ExchangeCosts | None
) -> float:
    """Updates a second under `settings.policy` divided by those under `allreduce`."""
    base = simulate_policy(replace(settings, policy="allreduce"), replicas, step, steps=steps, costs=costs)
    return (
        simulate_policy(settings, replicas, step, steps=steps, costs=costs).updates_per_second / base.updates_per_second
    )
