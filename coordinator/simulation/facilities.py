"""Simulates whole federations: queues, training, failures, transfers; up to 1,000 facilities x 1,000 rounds.

A facility's round: it receives the model, its job waits in a queue, trains, may fail and be queued again, and the
update is returned. All transfers of one direction share the coordinator's link. Policies for when a round closes:

- `synchronous`: when all updates have arrived (or their facilities have given up);
- `quorum`: when `quorum` updates have arrived; the others continue and count in the round in which they arrive;
- `deadline`: after `deadline_seconds`, with the updates received by then (at least one);
- `asynchronous`: every update is merged at once and its facility starts again; a round is as many updates as
  there are facilities.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.simulation.pipelines.result import Span
from coordinator.simulation.pipelines.transfers import finish_times
from facility.exchange.errors import ConfigurationError
from facility.exchange.validation import parse, validated

Array = NDArray[np.float64]
FORMAT = 1


@validated(frozen=True, kw_only=True)
class Queue:
    """How long a job waits for its start."""

    kind: Literal["none", "fixed", "exponential", "lognormal", "chance"] = "none"
    """`chance`: `seconds` with `probability`, drawn `draws` times; else none."""
    seconds: float = 0.0
    """Fixed, mean of the exponential, median of the lognormal, or length of a chance's delay."""
    spread: float = 1.0
    """Lognormal: standard deviation of the logarithm."""
    probability: float = 0.0
    draws: int = 1

    def __post_init__(self) -> None:
        if self.seconds < 0 or self.spread < 0 or not 0 <= self.probability <= 1 or self.draws < 1:
            raise ConfigurationError("queue needs seconds and spread of 0 or more, probability 0 to 1, draws 1 or more")

    def draw(self, random: np.random.Generator, count: int) -> Array:
        if self.kind == "exponential":
            return random.exponential(self.seconds, count)
        if self.kind == "lognormal":
            return self.seconds * np.exp(random.normal(0.0, self.spread, count))
        if self.kind == "chance":
            return self.seconds * random.binomial(self.draws, self.probability, count).astype(float)
        return np.full(count, self.seconds if self.kind == "fixed" else 0.0)


@validated(frozen=True, kw_only=True)
class Site:
    """One facility, or `count` alike."""

    name: str = "facility"
    count: int = 1
    train_seconds: float
    """One round's local work."""
    train_spread: float = 0.0
    """Uniform, this fraction of the seconds up and down."""
    queue: Queue = field(default_factory=Queue)
    download_megabytes_per_second: float = 0.0
    """Of this facility's own link; 0: not limited."""
    upload_megabytes_per_second: float = 0.0
    failure_probability: float = 0.0
    """Of a job; it fails at a uniform moment of its training."""
    attempts: int = 3
    """Jobs in a round before the facility skips the round."""

    def __post_init__(self) -> None:
        if not self.train_seconds > 0:
            raise ConfigurationError(f"train_seconds is {self.train_seconds}, expected more than 0")
        if not 0 <= self.train_spread < 1 or not 0 <= self.failure_probability < 1:
            raise ConfigurationError("train_spread and failure_probability must be from 0 to below 1")
        if self.count < 1 or self.attempts < 1:
            raise ConfigurationError(f"count is {self.count}, attempts {self.attempts}, expected 1 or more")
        if min(self.download_megabytes_per_second, self.upload_megabytes_per_second) < 0:
            raise ConfigurationError("download and upload are megabytes per second, 0 (not limited) or more")


@validated(frozen=True, kw_only=True)
class Federation:
    """What to simulate; the file of `--federation`."""

    rounds: int
    facilities: list[Site]
    model_megabytes: float = 0.0
    """What travels to a facility."""
    update_megabytes: float = -1.0
    """What comes back; -1: as much as the model."""
    coordinator_megabytes_per_second: float = 0.0
    """The coordinator's link, each direction; 0: not limited."""
    aggregate_seconds: float = 0.0
    """Between the last update of a round and the next model."""
    aggregate_seconds_per_update: float = 0.0
    policy: Literal["synchronous", "quorum", "deadline", "asynchronous"] = "synchronous"
    quorum: int = 0
    """Updates that close a round under `quorum`."""
    deadline_seconds: float = 0.0
    seed: int = 0
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.facilities:
            raise ConfigurationError("rounds must be 1 or more, and facilities must name at least one")
        if self.policy == "quorum" and not 1 <= self.quorum <= self.size:
            raise ConfigurationError(f"quorum is {self.quorum}, expected 1 to {self.size} (the facilities)")
        if self.policy == "deadline" and not self.deadline_seconds > 0:
            raise ConfigurationError(f"deadline_seconds is {self.deadline_seconds}, expected more than 0")
        if self.model_megabytes < 0 or self.coordinator_megabytes_per_second < 0 or self.aggregate_seconds < 0:
            raise ConfigurationError(
                "model_megabytes, coordinator_megabytes_per_second and aggregate_seconds: 0 or more"
            )

    @property
    def size(self) -> int:
        return sum(site.count for site in self.facilities)


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
    rounds_seconds: tuple[float, ...] = ()
    timeline: tuple[Span, ...] = ()
    """The first rounds, when asked for."""

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        del values["timeline"]
        return values


def read_federation(path: Path) -> Federation:
    """Read the file of `--federation`. Raises `ConfigurationError`."""
    try:
        raw = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot be read as JSON: {error}", file=path) from None
    federation = parse(Federation, raw, file=path)
    if federation.format > FORMAT:
        raise ConfigurationError(f"format {federation.format} is newer than {FORMAT}: update CrossFed", file=path)
    return federation


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
    parts: tuple[Array, Array, Array, Array]
    """Moments: model there, job started (the last attempt), trained, update there."""


class _Sites:
    """Facilities as arrays, and how a turn of some of them goes."""

    def __init__(self, federation: Federation) -> None:
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

    def turn(self, who: NDArray[np.intp], now: Array) -> _Turns:
        """Facilities `who` begin a turn at `now`; their transfers share the coordinator's link."""
        sizes = np.full(len(who), self.model)
        there = finish_times(now, sizes, self.download[who], self.capacity) if self.model else now
        trained, gave_up = there.copy(), np.zeros(len(who), dtype=bool)
        started = there.copy()
        training, queueing = np.zeros(len(who)), np.zeros(len(who))
        failures = np.zeros(len(who))
        for number, site in enumerate(self.federation.facilities):
            trying = np.flatnonzero(self.site_of[who] == number)
            for attempt in range(site.attempts):
                if not len(trying):
                    break
                queued = site.queue.draw(self.random, len(trying))
                full = (
                    site.train_seconds
                    * (1 + site.train_spread * self.random.uniform(-1, 1, len(trying)) if site.train_spread else 1.0)
                    * np.ones(len(trying))
                )
                failed = self.random.random(len(trying)) < site.failure_probability
                spent = np.where(failed, full * self.random.random(len(trying)), full)
                started[trying] = trained[trying] + queued
                trained[trying] += queued + spent
                queueing[trying] += queued
                training[trying] += spent
                failures[trying] += failed
                trying = trying[failed]
                if attempt == site.attempts - 1:
                    gave_up[trying] = True
        end = trained.copy()
        back = ~gave_up
        if self.update and back.any():
            amount = np.full(int(back.sum()), self.update)
            end[back] = finish_times(trained[back], amount, self.upload[who[back]], self.capacity)
        return _Turns(
            end=end,
            gave_up=gave_up,
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
    spans: list[Span] = field(default_factory=list)

    def add(self, turns: _Turns) -> None:
        self.failures += int(turns.failed.sum())
        self.training += float(turns.training.sum())
        self.queueing += float(turns.queueing.sum())
        self.transferring += float(turns.transferring.sum())

    def draw(self, sites: _Sites, who: NDArray[np.intp], turns: _Turns, now: Array, number: int) -> None:
        """Add this turn to the timeline."""
        for place, facility in enumerate(who):
            moments = [float(now[place]), *(float(part[place]) for part in turns.parts)]
            names = (f"act {number}", f"queue {number}", f"F{number}", f"grad {number}")
            for name, begin, end in zip(names, moments, moments[1:], strict=False):
                if end > begin and not name.startswith("queue"):
                    self.spans.append(Span(f"device {facility}", name, begin, end, number, int(facility)))


def simulate_federation(federation: Federation, *, timeline_rounds: int = 0) -> FederationResult:
    """Simulate all rounds; `timeline_rounds`: rounds, from the first, of which each facility's activity is kept."""
    sites = _Sites(federation)
    if federation.policy == "asynchronous":
        return _asynchronous(federation, sites)
    count = federation.size
    account = _Account()
    took_part = np.zeros(count)
    closes: list[float] = []
    now = 0.0
    end, gave_up = np.zeros(count), np.zeros(count, dtype=bool)
    idle, begins = np.arange(count), np.zeros(count)
    waited = 0.0
    while len(closes) < federation.rounds:
        turns = sites.turn(idle, begins)
        account.add(turns)
        if len(closes) < timeline_rounds:
            account.draw(sites, idle, turns, begins, len(closes))
        end[idle], gave_up[idle] = turns.end, turns.gave_up
        close = _close(federation, end, gave_up, now)
        arrived = np.flatnonzero(end <= close)
        good = arrived[~gave_up[arrived]]
        account.sat_out += int(gave_up[arrived].sum())
        took_part[good] += 1
        following = close + federation.aggregate_seconds + federation.aggregate_seconds_per_update * len(good)
        closes.append(following)
        waited += float((following - end[arrived]).sum())
        now = following
        idle, begins = arrived, np.full(len(arrived), following)
    return _result(federation, sites, closes, took_part, account, waited)


def _asynchronous(federation: Federation, sites: _Sites) -> FederationResult:
    """Nobody waits, so every facility's turns follow from themselves alone (each transfer has its own end's speed)."""
    count, wanted = federation.size, federation.size * federation.rounds
    sites.capacity = float("inf")
    who = np.arange(count)
    block = max(16, federation.rounds // 4)
    pause = federation.aggregate_seconds + federation.aggregate_seconds_per_update
    blocks: list[tuple[_Turns, Array]] = []
    reached = np.zeros(count)
    while True:
        turns = sites.turn(np.repeat(who, block), np.zeros(count * block))
        ends = reached[:, None] + np.cumsum(turns.end.reshape(count, block) + pause, axis=1)
        blocks.append((turns, ends))
        reached = ends[:, -1]
        ends_all = np.concatenate([e for _, e in blocks], axis=1)
        good = ~np.concatenate([t.gave_up.reshape(count, block) for t, _ in blocks], axis=1)
        moments = np.sort(ends_all[good])
        if len(moments) >= wanted and moments[wanted - 1] <= reached.min():
            break
    last = float(moments[wanted - 1])
    inside = ends_all <= last
    account = _Account(sat_out=int((~good & inside).sum()))
    for name in ("training", "queueing", "transferring"):
        values = np.concatenate([getattr(t, name).reshape(count, block) for t, _ in blocks], axis=1)
        setattr(account, name, float(values[inside].sum()))
    failed = np.concatenate([t.failed.reshape(count, block) for t, _ in blocks], axis=1)
    account.failures = int(failed[inside].sum())
    closes = [float(m) for m in moments[count - 1 : wanted : count]]
    took_part = (good & inside).sum(axis=1).astype(float)
    return _result(federation, sites, closes, took_part, account, pause * float(inside.sum()))


def _result(
    federation: Federation, sites: _Sites, closes: list[float], took_part: Array, account: _Account, waited: float
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
        rounds_seconds=tuple(float(v) for v in lengths),
        timeline=tuple(account.spans),
    )


def _close(federation: Federation, end: Array, gave_up: NDArray[np.bool_], now: float) -> float:
    """When the round that is open closes."""
    if federation.policy == "synchronous":
        return float(end.max())
    useful = np.sort(end[~gave_up])
    if federation.policy == "quorum":
        # Where too many gave up, the round closes with those that are left.
        return float(useful[min(federation.quorum, len(useful)) - 1]) if len(useful) else float(end.max())
    deadline = now + federation.deadline_seconds
    if len(useful) and useful[0] <= deadline:
        return min(deadline, float(end.max()))
    return float(useful[0]) if len(useful) else float(end.max())
