"""Latency and bandwidth between all pairs of ranks, and which ways out are shared."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from facility.measuring.profile import SharedUplink
from facility.measuring.tournament import crowds, groups_of, steps
from facility.measuring.wire import Wire

log = logging.getLogger(__name__)

SMALL = 8
"""Bytes of a ping."""


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """How long to measure."""

    pings: int = 10
    """Round trips timed for a latency."""
    target_seconds: float = 0.02
    """A bandwidth is taken from a message that takes at least so long, if `most_bytes` allow."""
    most_bytes: int = 64 * 2**20
    repeats: int = 3
    """Messages of that size; the fastest counts."""
    shared_below: float = 0.75
    """A way out is shared when flows together get less than this part of what they get one at a time."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLinks:
    """[sender][receiver]; infinite bandwidth and no latency on the diagonal."""

    latency_seconds: list[list[float]]
    bytes_per_second: list[list[float]]
    shared: list[SharedUplink]


def measure_links(
    wire: Wire,
    world: int,
    labels: Sequence[str],
    settings: LinkSettings,
    *,
    show_progress: bool = False,
) -> MeasuredLinks:
    """Measure all pairs; every rank calls this and gets the same answer. `labels`: the host or site of every rank."""
    groups = groups_of(labels)
    latency, rate = torch.zeros(world, world), torch.zeros(world, world)
    plan = steps(groups)
    for number, step in enumerate(plan):
        dist.barrier()
        for a, b in step:
            if wire.rank in (a, b):
                _meet(wire, a, b, settings, latency, rate)
        if show_progress and number and number % 50 == 0:
            log.info("links: %d of %d steps", number, len(plan))
    for table in (latency, rate):
        dist.all_reduce(table)
    shared = []
    for crowd_step in crowds(groups):
        dist.barrier()
        seconds = torch.zeros(world, dtype=torch.float64)
        sizes = torch.zeros(world, dtype=torch.float64)
        for flows in crowd_step:
            for source, target in flows:
                if wire.rank in (source, target):
                    size = _crowd_bytes(float(rate[source, target]), settings)
                    trip = float(latency[source, target] + latency[target, source])
                    taken = _flow(wire, source, target, size) - trip
                    if wire.rank == source:
                        seconds[source], sizes[source] = max(taken, 1e-9), size
        dist.all_reduce(seconds)
        dist.all_reduce(sizes)
        for flows in crowd_step:
            alone = sum(float(rate[a, b]) for a, b in flows)
            # Flows that end later had the link to themselves for a while: the slowest one dates the crowd.
            together = sum(float(sizes[a]) for a, _ in flows) / max(float(seconds[a]) for a, _ in flows)
            if together < settings.shared_below * alone:
                senders, receivers = ([g for g in groups if flows[0][side] in g][0] for side in (0, 1))
                name = f"{labels[senders[0]]} to {labels[receivers[0]]}"
                shared.append(
                    SharedUplink(
                        name=name, bytes_per_second=together, sources=tuple(senders), destinations=tuple(receivers)
                    )
                )
    rates = [[float("inf") if i == j else float(rate[i, j]) for j in range(world)] for i in range(world)]
    return MeasuredLinks(latency_seconds=latency.tolist(), bytes_per_second=rates, shared=shared)


def _meet(wire: Wire, a: int, b: int, settings: LinkSettings, latency: torch.Tensor, rate: torch.Tensor) -> None:
    """Both directions of one pair. Rank a writes what it sends, rank b what it sends."""
    trip = _round_trip(wire, a, b, settings)
    if wire.rank == a:
        latency[a, b] = latency[b, a] = trip / 2
    for source, target in ((a, b), (b, a)):
        found = _bandwidth(wire, source, target, trip, settings)
        if wire.rank == source:
            rate[source, target] = found


def _round_trip(wire: Wire, a: int, b: int, settings: LinkSettings) -> float:
    """Median seconds of a ping and its answer; both sides agree on it (rank a tells)."""
    ball = torch.zeros(SMALL // 8, dtype=torch.int64, device=wire.device)
    trips = []
    for _ in range(settings.pings + 2):
        begin = time.perf_counter()
        if wire.rank == a:
            wire.send(ball, b)
            wire.receive(ball, b)
        else:
            wire.receive(ball, a)
            wire.send(ball, a)
        trips.append(time.perf_counter() - begin)
    box = torch.tensor([statistics.median(trips[2:])], dtype=torch.float64, device=wire.device)
    if wire.rank == a:
        wire.send(box, b)
    else:
        wire.receive(box, a)
    return float(box)


def _flow(wire: Wire, source: int, target: int, size: int) -> float:
    """Seconds of one message of `size` bytes and a short answer, on the sender's clock."""
    payload = torch.zeros(size, dtype=torch.uint8, device=wire.device)
    answer = torch.zeros(1, dtype=torch.int64, device=wire.device)
    begin = time.perf_counter()
    if wire.rank == source:
        wire.send(payload, target)
        wire.receive(answer, target)
    else:
        wire.receive(payload, source)
        wire.send(answer, source)
    return time.perf_counter() - begin


def _bandwidth(wire: Wire, source: int, target: int, trip: float, settings: LinkSettings) -> float:
    """Bytes per second one way: grow the message until it takes long enough, then the best of some."""
    size, best = 64 * 2**10, 0.0
    order = torch.zeros(1, dtype=torch.int64, device=wire.device)
    while True:
        seconds = max(_flow(wire, source, target, size) - trip, 1e-9)
        following = 0
        if wire.rank == source and seconds < settings.target_seconds and size < settings.most_bytes:
            grown = size * min(16.0, max(2.0, 1.2 * settings.target_seconds / seconds))
            following = min(settings.most_bytes, int(grown))
        following = _tell(wire, source, target, order, following)
        if not following:
            break
        size = following
    for number in range(settings.repeats):
        seconds = max(_flow(wire, source, target, size) - trip, 1e-9)
        best = max(best, size / seconds)
        # A slow link is known well enough after one message.
        if _tell(wire, source, target, order, int(number + 1 < settings.repeats and seconds < 0.25)) == 0:
            break
    return best


def _tell(wire: Wire, source: int, target: int, box: torch.Tensor, value: int) -> int:
    """The sender's decision, on both sides."""
    box.fill_(value)
    if wire.rank == source:
        wire.send(box, target)
    else:
        wire.receive(box, source)
    return int(box)


def _crowd_bytes(rate: float, settings: LinkSettings) -> int:
    """A message that takes five times the target at the speed the pair has alone."""
    return int(min(settings.most_bytes, max(64 * 2**10, 5 * settings.target_seconds * rate)))
