"""Simulates whole federations: queues, training, failures, transfers; up to 1,000 facilities x 1,000 rounds.

A facility's round: it receives the model, its job waits in a queue, trains, may fail and be queued again, and the
update is returned. Transfers of facilities that begin together share the coordinator's link in each direction; late
ones slow down nobody else's, and under `asynchronous` none does. Policies for when a round closes:

- `synchronous`: when all updates have arrived (or their facilities have given up);
- `quorum`: when `quorum` updates have arrived, or, short of that, all jobs have ended; the others continue and count in
  the round in which they arrive, or never (`late: drop`); a round waits for those that no later one could use
  (`keep_rounds`), and the last for all, as the coordinator's do;
- `deadline`: after `deadline_seconds`, with the updates received by then (at least one);
- `asynchronous`: every update is merged at once and its facility starts again; a round is as many updates as
  there are facilities.

With `fan_in` several coordinators average in a tree (`coordinator.simulation.tree`), for 10,000 facilities and more.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.simulation.common_ends import CommonEnds
from coordinator.simulation.described import Array, Scenario
from coordinator.simulation.pipelines.result import Span
from coordinator.simulation.pipelines.transfers import finish_times
from coordinator.simulation.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FederationResult:
    """Means are over facility-rounds; shares are of a facility's whole time."""

    seconds: float
    rounds: int
    round_seconds: float
    """Mean."""
    updates: int
    """Updates that took part."""
    updates_per_hour: float
    jobs_failed: int
    sat_out: int
    """Facility-rounds given up after the last attempt."""
    participation: dict[str, float]
    """Site name -> updates of one of its facilities, by round."""
    training_share: float
    queue_share: float
    transfer_share: float
    waiting_share: float
    """Idle until the round closes."""
    samples_per_hour: float = 0.0
    """Of the updates that took part, in the unit of the sites' `samples`."""
    rounds_seconds: tuple[float, ...] = ()
    timeline: tuple[Span, ...] = ()
    """The first rounds, when asked for."""

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        del values["timeline"]
        return values


@dataclass
class _Turns:
    """One turn of some facilities: when it ends, and where its time went."""

    end: Array
    gave_up: NDArray[np.bool_]
    training: Array
    queueing: Array
    transferring: Array
    failed: Array
    """Jobs that failed."""
    work: Array
    """Rounds' work that was done."""
    parts: tuple[Array, Array, Array, Array]
    """Moments: model there, job started (the last attempt), trained, update there."""

    def where(self, chosen: NDArray[np.bool_]) -> _Turns:
        """The turns of the facilities that `chosen` selects."""
        return _Turns(
            end=self.end[chosen],
            gave_up=self.gave_up[chosen],
            training=self.training[chosen],
            queueing=self.queueing[chosen],
            transferring=self.transferring[chosen],
            failed=self.failed[chosen],
            work=self.work[chosen],
            parts=tuple(part[chosen] for part in self.parts),  # type: ignore[arg-type]
        )


class _Sites:
    """Facilities as arrays, and how a turn of some of them goes."""

    def __init__(self, federation: Scenario) -> None:
        self.federation = federation
        self.random = np.random.default_rng(federation.seed)
        sites = [site for site in federation.facilities for _ in range(site.count)]
        self.site_of = np.repeat(np.arange(len(federation.facilities)), [site.count for site in federation.facilities])
        limit = 1e15

        def rates(name: str) -> Array:
            return np.array([1e6 * getattr(site, name) or limit for site in sites])

        self.download, self.upload = rates("download_megabytes_per_second"), rates("upload_megabytes_per_second")
        self.capacity = 1e6 * federation.coordinator_megabytes_per_second or float("inf")
        self.model = 1e6 * federation.model_megabytes
        update = federation.update_megabytes if federation.update_megabytes >= 0 else federation.model_megabytes
        self.update = 1e6 * update
        self.tree = self._tree() if federation.fan_in else None
        self.ends = CommonEnds(federation, sites) if federation.steps == "elastic" else None
        self.samples = np.array([site.samples for site in sites])

    def _tree(self) -> Tree:
        settings = self.federation
        return Tree(
            fan_in=settings.fan_in,
            capacity=self.capacity,
            model=self.model,
            partial=1e6 * settings.partial_megabytes if settings.partial_megabytes >= 0 else 4 * self.update,
            seconds=settings.aggregate_seconds,
            seconds_per_update=settings.aggregate_seconds_per_update,
        )

    def _sent(self, now: Array, index: NDArray[np.intp]) -> Array:
        """When facilities have the model that the coordinator has at `now`."""
        if not self.model:
            return now
        if self.tree is not None:
            return self.tree.transfers(now + self.tree.model_delay(len(index)), self.model, self.download[index])
        return finish_times(now, np.full(len(index), self.model), self.download[index], self.capacity)

    def _returned(self, trained: Array, index: NDArray[np.intp], back: NDArray[np.bool_]) -> Array:
        """Times at which the updates of facilities that come `back` are at their coordinator."""
        end = trained.copy()
        if not self.update or not back.any():
            return end
        if self.tree is not None:
            return np.where(back, self.tree.transfers(trained, self.update, self.upload[index]), end)
        amount = np.full(int(back.sum()), self.update)
        end[back] = finish_times(trained[back], amount, self.upload[index[back]], self.capacity)
        return end

    def delivered(self, index: NDArray[np.intp], work: Array) -> float:
        """Samples of the updates of facilities `index`, whose jobs are known from now on."""
        if self.ends is not None:
            self.ends.arrived(index)
        return float(work @ self.samples[index])

    def following(self, close: float, end: Array, updates: int) -> float:
        """When the next model is there, for a round that closes at `close`."""
        if self.tree is not None:
            return self.tree.finished(end)
        settings = self.federation
        return close + settings.aggregate_seconds + settings.aggregate_seconds_per_update * updates

    def turn(self, index: NDArray[np.intp], now: Array, round_begins: float = 0.0) -> _Turns:
        """Facilities `index` begin a turn at `now`; their transfers share the coordinator's link.

        `round_begins`: when the model was made that they begin from.
        """
        until = np.inf if self.ends is None else round_begins + self.ends.next()
        work = np.ones(len(index))
        there = self._sent(now, index)
        trained, gave_up = there.copy(), np.zeros(len(index), dtype=bool)
        started = there.copy()
        training, queueing, last = np.zeros(len(index)), np.zeros(len(index)), np.zeros(len(index))
        failures = np.zeros(len(index))
        for number, site in enumerate(self.federation.facilities):
            trying = np.flatnonzero(self.site_of[index] == number)
            for attempt in range(site.attempts):
                if not len(trying):
                    break
                queued = site.queue.draw(self.random, len(trying))
                if self.ends is not None and attempt == 0:  # another attempt keeps the steps of the first
                    work[trying] = self.ends.work(index[trying], until - there[trying] - queued)
                full = (
                    work[trying]
                    * site.train_seconds
                    * (1 + site.train_spread * self.random.uniform(-1, 1, len(trying)) if site.train_spread else 1.0)
                    * np.ones(len(trying))
                )
                failed = self.random.random(len(trying)) < site.failure_probability
                spent = np.where(failed, full * self.random.random(len(trying)), full)
                started[trying] = trained[trying] + queued
                trained[trying] += queued + spent
                queueing[trying] += queued
                training[trying] += spent
                last[trying] = spent
                failures[trying] += failed
                trying = trying[failed]
                if attempt == site.attempts - 1:
                    gave_up[trying] = True
        end = self._returned(trained, index, ~gave_up)
        if self.ends is not None:
            self.ends.began(index, beside=end - now - last, back=end - trained)
        return _Turns(
            end=end,
            gave_up=gave_up,
            work=work,
            training=training,
            queueing=queueing,
            transferring=(there - now) + (end - trained),
            failed=failures,
            parts=(there, started, trained, end),
        )


@dataclass
class _Account:
    failures: int = 0
    sat_out: int = 0
    training: float = 0.0
    queueing: float = 0.0
    transferring: float = 0.0
    samples: float = 0.0
    """Of updates that took part."""
    spans: list[Span] = field(default_factory=list)

    def add(self, turns: _Turns) -> None:
        self.failures += int(turns.failed.sum())
        self.training += float(turns.training.sum())
        self.queueing += float(turns.queueing.sum())
        self.transferring += float(turns.transferring.sum())

    def cut(self, now: float, latest: Array) -> None:
        """Take back what turns under way would take after `now`, the federation's end.

        `latest`: of each facility's latest turn, its beginning, `_Turns.parts` and seconds in queues.
        """
        begin, there, started, trained, end, queueing = latest

        def after(first: Array, last: Array) -> Array:
            return np.maximum(last - np.maximum(first, now), 0.0)

        tried, left = started - there, after(there, started)  # in queues, and in attempts that failed
        queued = left * np.divide(queueing, tried, out=np.zeros_like(tried), where=tried > 0)
        self.transferring -= float((after(begin, there) + after(trained, end)).sum())
        self.queueing -= float(queued.sum())
        self.training -= float((left - queued + after(started, trained)).sum())

    def draw(self, index: NDArray[np.intp], turns: _Turns, now: Array, number: int) -> None:
        """Add this turn to the timeline."""
        for place, facility in enumerate(index):
            moments = [float(now[place]), *(float(part[place]) for part in turns.parts)]
            names = (f"act {number}", f"queue {number}", f"F{number}", f"grad {number}")
            for name, begin, end in zip(names, moments, moments[1:], strict=False):
                if end > begin and not name.startswith("queue"):
                    self.spans.append(Span(f"device {facility}", name, begin, end, number, int(facility)))


def simulate_federation(federation: Scenario, *, timeline_rounds: int = 0) -> FederationResult:
    """Simulate all rounds; `timeline_rounds`: rounds, from the first, of which each facility's activity is kept."""
    sites = _Sites(federation)
    if federation.policy == "asynchronous":
        return _asynchronous(federation, sites)
    if federation.late == "drop":
        return _dropping(federation, sites, timeline_rounds)
    count, account, now = federation.size, _Account(), 0.0
    took_part, began, latest = np.zeros(count), np.zeros(count, dtype=int), np.zeros((6, count))
    closes: list[float] = []
    end, gave_up, work = np.zeros(count), np.zeros(count, dtype=bool), np.ones(count)
    idle, begins, waited = np.arange(count), np.zeros(count), 0.0
    while len(closes) < federation.rounds:
        began[idle] = len(closes)
        turns = sites.turn(idle, begins, now)
        account.add(turns)
        latest[:, idle] = begins, *turns.parts, turns.queueing
        if len(closes) < timeline_rounds:
            account.draw(idle, turns, begins, len(closes))
        end[idle], gave_up[idle], work[idle] = turns.end, turns.gave_up, turns.work
        close = _close(federation, end, gave_up, now)
        if federation.policy == "quorum":  # what no later round could use is waited for
            oldest = federation.most_late if len(closes) < federation.rounds - 1 else 0
            close = float(end[len(closes) - began >= oldest].max(initial=close))
        arrived = np.flatnonzero(end <= close)
        good = arrived[~gave_up[arrived]]
        account.sat_out += int(gave_up[arrived].sum())
        took_part[good] += 1
        account.samples += sites.delivered(good, work[good])
        now = sites.following(close, end, len(good))
        closes.append(now)
        waited += float((now - end[arrived]).sum())
        idle, begins = arrived, np.full(len(arrived), now)
    account.cut(now, latest)
    waited += float(np.maximum(now - np.delete(end, idle), 0.0).sum())  # came as the last model was made
    return _result(federation, sites, closes, took_part, account, waited)


def _dropping(federation: Scenario, sites: _Sites, timeline_rounds: int) -> FederationResult:
    """A facility whose update is discarded begins from the newest model once its job has ended, amid a round too."""
    everyone, account, closes = np.arange(federation.size), _Account(), []
    took_part, free = np.zeros(federation.size), np.zeros(federation.size)  # free: since when each has no job
    now = waited = 0.0
    for number in range(federation.rounds):
        begins = np.maximum(free, now)
        turns = sites.turn(everyone, begins, now)
        last = number == federation.rounds - 1
        close = float(turns.end.max()) if last else _close(federation, turns.end, turns.gave_up, now)
        begun, arrived = begins <= close, turns.end <= close  # one that has not begun by then still has its job before
        good = arrived & ~turns.gave_up
        trained = turns.parts[2]
        own = turns.where(begun)
        account.add(own)
        account.transferring -= float((turns.end - trained)[begun & ~arrived].sum())
        account.sat_out += int(own.gave_up.sum())
        if number < timeline_rounds:
            account.draw(everyone[begun], own, begins[begun], number)
        waited += float((begins - free)[begun].sum())
        free = np.where(arrived, turns.end, np.where(begun, trained, free))
        took_part += good
        account.samples += sites.delivered(everyone[good], turns.work[good])
        now = sites.following(close, turns.end, int(good.sum()))
        closes.append(now)
    waited += float((now - free).sum())
    return _result(federation, sites, closes, took_part, account, waited)


def _asynchronous(federation: Scenario, sites: _Sites) -> FederationResult:
    """No facility waits for another, so turns are independent (each transfer has the speed of its own link)."""
    count, wanted = federation.size, federation.size * federation.rounds
    sites.capacity = float("inf")
    index = np.arange(count)
    block = max(16, federation.rounds // 4)
    pause = federation.aggregate_seconds + federation.aggregate_seconds_per_update
    blocks: list[tuple[_Turns, Array]] = []
    reached = np.zeros(count)
    while True:
        turns = sites.turn(np.repeat(index, block), np.zeros(count * block))
        ends = reached[:, None] + np.cumsum(turns.end.reshape(count, block) + pause, axis=1)
        blocks.append((turns, ends))
        reached = ends[:, -1]
        ends_all = np.concatenate([e for _, e in blocks], axis=1)
        good = ~np.concatenate([t.gave_up.reshape(count, block) for t, _ in blocks], axis=1)
        moments = np.sort(ends_all[good])
        if len(moments) >= wanted and moments[wanted - 1] < reached.min():
            break
    last = float(moments[wanted - 1])
    inside = ends_all <= last
    own = np.arange(count), inside.sum(axis=1)  # of each facility, the turn under way then
    every = {
        name: np.concatenate([getattr(t, name).reshape(count, block) for t, _ in blocks], axis=1)
        for name in ("training", "queueing", "transferring", "failed")
    }
    account = _Account(sat_out=int((~good & inside).sum()), failures=int(every.pop("failed")[inside].sum()))
    for name, values in every.items():
        setattr(account, name, float(values[inside].sum() + values[own].sum()))
    begun = np.concatenate([np.zeros((count, 1)), ends_all], axis=1)[own]
    parts = np.concatenate([np.stack(t.parts).reshape(4, count, block) for t, _ in blocks], axis=2)[:, *own] + begun
    account.cut(last, np.array([begun, *parts, every["queueing"][own]]))
    closes = [float(m) for m in moments[count - 1 : wanted : count]]
    took_part = (good & inside).sum(axis=1).astype(float)
    account.samples = float(took_part @ sites.samples)
    waited = pause * float(inside.sum()) + float(np.maximum(last - parts[-1], 0.0).sum())
    return _result(federation, sites, closes, took_part, account, waited)


def _result(
    federation: Scenario, sites: _Sites, closes: list[float], took_part: Array, account: _Account, waited: float
) -> FederationResult:
    whole = closes[-1] * federation.size
    lengths = np.diff([0.0, *closes])
    return FederationResult(
        seconds=closes[-1],
        rounds=federation.rounds,
        round_seconds=float(lengths.mean()),
        updates=int(took_part.sum()),
        updates_per_hour=3600 * float(took_part.sum()) / closes[-1],
        jobs_failed=account.failures,
        sat_out=account.sat_out,
        participation={
            site.name: float(took_part[sites.site_of == number].mean()) / federation.rounds
            for number, site in enumerate(federation.facilities)
        },
        training_share=account.training / whole,
        queue_share=account.queueing / whole,
        transfer_share=account.transferring / whole,
        waiting_share=waited / whole,
        samples_per_hour=3600 * account.samples / closes[-1],
        rounds_seconds=tuple(float(v) for v in lengths),
        timeline=tuple(account.spans),
    )


def _close(federation: Scenario, end: Array, gave_up: NDArray[np.bool_], now: float) -> float:
    """When the round that is open closes."""
    if federation.policy == "synchronous":
        return float(end.max())
    useful = np.sort(end[~gave_up])
    if federation.policy == "quorum":
        # Those that came between the last closing and this round's model are handed on once it is open.
        return max(now, float(useful[federation.quorum - 1] if len(useful) >= federation.quorum else end.max()))
    deadline = now + federation.deadline_seconds
    if len(useful) and useful[0] <= deadline:
        return min(deadline, float(end.max()))
    return float(useful[0]) if len(useful) else float(end.max())
