"""Latency and bandwidth between all pairs of ranks, and which ways out are shared."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from facility.measuring.bandwidth import SHARE, SharpTimes, Trips, measure_bandwidth
from facility.measuring.profile import SharedUplink
from facility.measuring.round_robin import flow_steps, groups_of, pairing_steps
from facility.measuring.wire import Wire

log = logging.getLogger(__name__)

SMALL = 8
"""Bytes of a ping."""


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """How long to measure."""

    pings: int = 10
    """Round trips timed for a latency."""
    sharp: SharpTimes = field(default_factory=SharpTimes)
    shared_below: float = 0.75
    """A way out is shared when flows together get less than this part of what they get one at a time."""
    crowd_tries: int = 3
    """Of which the median counts."""


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
    show_progress: bool,
) -> MeasuredLinks:
    """Measure all pairs; every rank calls this and gets the same answer. `labels`: the host or site of every rank."""
    groups = groups_of(labels)
    latency, rate = torch.zeros(world, world), torch.zeros(world, world)
    plan = pairing_steps(groups)
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
    for crowd_step in flow_steps(groups):
        tries = [_together(wire, crowd_step, latency, rate, settings) for _ in range(settings.crowd_tries)]
        for flows, found in zip(crowd_step, zip(*tries, strict=True), strict=True):
            alone = sum(float(rate[a, b]) for a, b in flows)
            together = statistics.median(found)
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


def _together(
    wire: Wire,
    step: Sequence[Sequence[tuple[int, int]]],
    latency: torch.Tensor,
    rate: torch.Tensor,
    settings: LinkSettings,
) -> list[float]:
    """Bytes per second that each crowd of flows got together. One that begins late, on a busy machine, shares less of
    its time than it seems to: a single try may find too much."""
    dist.barrier()
    seconds, sizes = (torch.zeros(rate.shape[0], dtype=torch.float64) for _ in range(2))
    for source, target in (flow for flows in step for flow in flows):
        if wire.rank in (source, target):
            size = _crowd_bytes(float(rate[source, target]), settings)
            trip = float(latency[source, target] + latency[target, source])
            flow = _flow(wire, source, target, size)
            if wire.rank == source:
                seconds[source], sizes[source] = max(flow - trip, flow * SHARE), size
    dist.all_reduce(seconds)
    dist.all_reduce(sizes)
    # Flows that end later had the link to themselves for a while: the slowest one dates the crowd.
    return [sum(float(sizes[a]) for a, _ in flows) / max(float(seconds[a]) for a, _ in flows) for flows in step]


def _meet(wire: Wire, a: int, b: int, settings: LinkSettings, latency: torch.Tensor, rate: torch.Tensor) -> None:
    """Both directions of one pair. Rank a writes what it sends, rank b what it sends."""
    trips = _round_trips(wire, a, b, settings)
    if wire.rank == a:
        latency[a, b] = latency[b, a] = trips.median / 2
    for source, target in ((a, b), (b, a)):
        found = _bandwidth(wire, source, target, trips, settings)
        if wire.rank == source:
            rate[source, target] = found


def _round_trips(wire: Wire, a: int, b: int, settings: LinkSettings) -> Trips:
    """Seconds of a ping and its answer; both sides use those of rank a."""
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
    seconds = [statistics.median(trips[2:]), min(trips[2:])]
    box = torch.tensor(seconds, dtype=torch.float64, device=wire.device)
    if wire.rank == a:
        wire.send(box, b)
    else:
        wire.receive(box, a)
    median, least = box.tolist()
    return Trips(median=median, least=least)


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


def _bandwidth(wire: Wire, source: int, target: int, trips: Trips, settings: LinkSettings) -> float:
    """Bytes per second one way; the sender's, and of no meaning on the other side."""
    order = torch.zeros(1, dtype=torch.int64, device=wire.device)
    found = measure_bandwidth(
        lambda size: _flow(wire, source, target, size),
        lambda value: _agree(wire, source, target, order, value),
        trips,
        settings.sharp,
    )
    if wire.rank == source and not found.stands_out:
        log.warning(
            "the bandwidth from rank %d to %d does not stand out of the noise of its pings (%.2g to %.2g s): "
            "%.3g MB/s, what messages and pings got together, is taken for it",
            source,
            target,
            trips.least,
            trips.median,
            found.bytes_per_second / 1e6,
        )
    return found.bytes_per_second


def _agree(wire: Wire, source: int, target: int, box: torch.Tensor, value: int) -> int:
    """The sender's decision, on both sides."""
    box.fill_(value)
    if wire.rank == source:
        wire.send(box, target)
    else:
        wire.receive(box, source)
    return int(box)


def _crowd_bytes(rate: float, settings: LinkSettings) -> int:
    """A message that takes five times the target at the speed the pair has alone."""
    return int(min(settings.sharp.most_bytes, max(64 * 2**10, 5 * settings.sharp.target_seconds * rate)))
