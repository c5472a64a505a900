"""Pipelines that never flush (1F1B, one update a micro-batch) under a synchronisation policy: updates per second.

Every stage of every pipeline is a small program that computes, sends, receives and meets others; an event loop moves
time on. The order of work is that of `tests.reproductions.pipedream`, the groups are the facility's own pure
schedulers'. After Miao et al., "SDPipe", PVLDB 16(9), 2023, whose experiments use this schedule.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any

from facility.exchange.messages.sync import SyncSettings
from facility.exchange.scheduling.groups import Group

Compute = Callable[[int, int, int], float]
"""(pipeline, stage, draw) -> seconds of the draw-th pass of that stage: even a forward, odd a backward."""
Program = Generator[tuple[Any, ...], None, None]


class _Run:
    def __init__(
        self, settings: SyncSettings, pipelines: int, stages: int, compute: Compute, steps: int, exchange_seconds: float
    ) -> None:
        settings = replace(settings, minimum=1, relay=0.0)  # as `tests.reproductions.stagewise` does for such stages
        self.pipelines, self.stages, self.compute, self.steps = pipelines, stages, compute, steps
        self.exchange_seconds, self.lockstep = exchange_seconds, settings.lockstep
        self.schedulers = [
            settings.scheduler(replicas=pipelines, steps=steps, members=range(pipelines)) for _ in range(stages)
        ]
        self._holder: int | None = None
        for stage, scheduler in enumerate(self.schedulers):
            if settings.bound != 1:
                scheduler.may_hold = partial(self.may_hold, stage)
        self.exchange_first = False
        self.now = 0.0
        self.updates = 0
        self._heap: list[tuple[float, int, Program]] = []
        self._sequence = 0
        self._mail: dict[tuple[Any, ...], deque[Any]] = defaultdict(deque)
        self._reader: dict[tuple[Any, ...], Program] = {}
        self._asking: dict[tuple[int, int], Program] = {}
        self._met: dict[tuple[Any, ...], list[Program]] = defaultdict(list)
        self._stopped: set[int] = set()

    def stage(self, pipeline: int, stage: int) -> Program:
        """What one rank does, as `tests.reproductions.pipedream.run` orders it."""
        first, last = stage == 0, stage == self.stages - 1
        started, done = 0, 0
        ended = False
        in_flight: deque[int] = deque()
        warm_up = self.stages - stage - 1
        while True:
            forwards = started < warm_up and not ended
            if not ended:
                if first:
                    more = self.wants_more(pipeline, done, len(in_flight))
                else:
                    yield ("receive", (pipeline, stage, "activation"))
                    more = self._mail[pipeline, stage, "activation"].popleft()
                if more:
                    yield ("sleep", self.compute(pipeline, stage, 2 * started))
                    in_flight.append(started)
                    started += 1
                if not last:
                    self.send((pipeline, stage + 1, "activation"), more)
                ended = not more
            if forwards and not ended:
                continue
            if not in_flight:
                if ended:
                    return self.finish(pipeline, stage)
                continue
            number = in_flight.popleft()
            if not last:
                yield ("receive", (pipeline, stage, "gradient"))
                self._mail[pipeline, stage, "gradient"].popleft()
            yield ("sleep", self.compute(pipeline, stage, 2 * number + 1))
            if not first and not self.exchange_first:
                self.send((pipeline, stage - 1, "gradient"), True)
            yield ("meet", pipeline, stage, done)
            if not first and self.exchange_first:
                self.send((pipeline, stage - 1, "gradient"), True)
            done += 1
            self.updates += stage == 0

    def wants_more(self, pipeline: int, done: int, in_flight: int) -> bool:
        if self.schedulers[0].rules.budget:
            return pipeline not in self._stopped
        return done + in_flight < self.steps

    def send(self, box: tuple[Any, ...], item: Any) -> None:
        self._mail[box].append(item)
        reader = self._reader.pop(box, None)
        if reader is not None:
            self.push(self.now, reader)

    def push(self, at: float, program: Program) -> None:
        heapq.heappush(self._heap, (at, self._sequence, program))
        self._sequence += 1

    def advance(self, program: Program) -> None:
        """Run a program until it waits for time, mail or others."""
        for request in program:
            if request[0] == "sleep":
                return self.push(self.now + request[1], program)
            if request[0] == "receive":
                if self._mail[request[1]]:
                    continue
                self._reader[request[1]] = program
                return None
            return self.meet(program, *request[1:])
        return None

    def meet(self, program: Program, pipeline: int, stage: int, update: int) -> None:
        """Announce an update to the stage's scheduler and wait for the group."""
        if self.lockstep:
            return self.arrive(program, ("all", stage, update), self.pipelines)
        self._asking[pipeline, stage] = program
        self.carry_out(stage, self.schedulers[stage].ready(pipeline, self.now))
        return None

    def may_hold(self, stage: int, wanted: bool) -> bool:
        """One stage at a time holds pipelines back for a connection, as `tests.reproductions.permission` arranges."""
        if wanted and self._holder is None:
            self._holder = stage
        elif not wanted and self._holder == stage:
            self._holder = None
        return self._holder == stage

    def carry_out(self, stage: int, groups: list[Group]) -> None:
        for group in groups:
            for member in map(int, group.members):
                if stage == 0 and self.schedulers[0].stop:
                    self._stopped.add(member)
                self.join(self._asking.pop((member, stage)), stage, group)
                seconds = self.exchange_seconds if len(group.members) > 1 else 0.0
                self.schedulers[stage].exchanged(member, self.now + seconds)

    def join(self, program: Program, stage: int, group: Group) -> None:
        if len(group.members) == 1:
            return self.push(self.now, program)
        return self.arrive(program, (group.number, stage), len(group.members))

    def arrive(self, program: Program, key: tuple[Any, ...], count: int) -> None:
        """An exchange begins when all of its members have come."""
        here = self._met[key]
        here.append(program)
        if len(here) == count:
            for other in self._met.pop(key):
                self.push(self.now + self.exchange_seconds, other)

    def run(self) -> float:
        programs = [self.stage(p, s) for p in range(self.pipelines) for s in range(self.stages)]
        for program in programs:
            self.push(0.0, program)
        while True:
            wake, stage = self.next_wake()
            if not self._heap and wake is None:
                return self.now
            if wake is not None and (not self._heap or wake <= self._heap[0][0]):
                self.now = max(self.now, wake)
                self.carry_out(stage, self.schedulers[stage].tick(self.now))
                continue
            self.now, _, program = heapq.heappop(self._heap)
            self.advance(program)

    def next_wake(self) -> tuple[float | None, int]:
        """The earliest call that a stage's scheduler waits for, and which stage's."""
        wakes = [(s.wake, stage) for stage, s in enumerate(self.schedulers) if s.wake is not None]
        return min(wakes) if wakes else (None, 0)

    def finish(self, pipeline: int, stage: int) -> None:
        """A stage makes no more updates."""
        if not self.lockstep:
            groups = self.schedulers[stage].finish(pipeline, self.now)
            self.carry_out(stage, [g for g in groups if not g.final])


def simulate_endless(
    settings: SyncSettings,
    pipelines: int,
    stages: int,
    compute: Compute,
    *,
    steps: int,
    exchange_seconds: float = 0.0,
    exchange_first: bool = False,
) -> float:
    """Updates per second of all pipelines together, `steps` for each (or as many together).

    `exchange_first`: a stage sends its gradient upstream only after its exchange, as SDPipe's artefact does.
    """
    run = _Run(settings, pipelines, stages, compute, steps, exchange_seconds)
    run.exchange_first = exchange_first
    seconds = run.run()
    return run.updates / seconds
