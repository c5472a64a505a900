"""Simulate iterations of a layout. Picks the longest-path engine when no link is shared, the event engine otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from coordinator.simulation.pipelines import collectives, steady
from coordinator.simulation.pipelines.assembly import LETTERS, assemble
from coordinator.simulation.pipelines.events import run
from coordinator.simulation.pipelines.graph import Compute, Message, Template, template
from coordinator.simulation.pipelines.layout import Array, Layout
from coordinator.simulation.pipelines.longest import Costs, times
from coordinator.simulation.pipelines.orders import order
from coordinator.simulation.pipelines.result import SimulationResult, Span
from coordinator.simulation.pipelines.steady import Lengths
from facility.exchange.schedules.ops import Kind, peak_bytes
from facility.exchange.scheduling.policies import POLICIES

Stall = Callable[[int, int, int], float]
"""(replica, stage, number of the forward or backward) -> seconds lost before it."""


@dataclass(frozen=True, kw_only=True)
class _Moments:
    """Seconds since the iteration began, [iteration] or as said."""

    pipeline: Array
    synced: Array
    finished: Array


def simulate_layout(
    layout: Layout,
    *,
    iterations: int = 1,
    stall: Stall | None = None,
    timeline: bool = False,
    engine: str = "auto",
    continued: bool = False,
) -> SimulationResult:
    """Simulate `iterations` iterations that begin together on all devices.

    Synchronous policies only; `sync_every` > 1 averages iterations with and without synchronisation. `engine`:
    `auto`, `longest path` (refuses nothing, but divides no link) or `events`. `continued`: long batches from short ones
    (`steady`), where neither stalls nor a timeline are asked for.
    """
    assert layout.sync == "none" or POLICIES.get(layout.sync).synchronous, layout.sync
    shared = bool(layout.uplinks) and any(layout.uplinks_of(a, b) for a, b in _traffic(layout))
    events = engine == "events" or (engine == "auto" and shared)
    count = iterations if stall is not None else 1
    spans: tuple[Span, ...] = ()
    continued = continued and stall is None and not timeline
    if events and continued and (found := steady.shorter(layout)) is not None:
        moments = _continued(*found)
    elif events:
        moments, spans = _by_events(layout, count, stall, timeline=timeline)
    else:
        moments, spans = _by_longest_path(layout, count, stall, timeline=timeline, continued=continued)
    every = layout.sync_every if layout.sync != "none" and POLICIES.get(layout.sync).periodic else 1
    synced = 0.0 if layout.sync == "none" else float((moments.synced - moments.pipeline).mean()) / every
    update = float((moments.finished - moments.synced).mean())
    total = moments.pipeline + update + (moments.synced - moments.pipeline) / every
    if layout.sync == "none":
        total = moments.pipeline + update
    values = tuple(float(v) for v in (total if stall is not None else np.repeat(total, iterations)))
    mean = float(np.mean(values))
    busy = _busy(layout)
    pipeline = float(moments.pipeline.mean())
    pipeline_bytes = 2 * float(layout.cut_bytes.sum()) * sum(layout.micro_batches)
    return SimulationResult(
        iteration_seconds=mean,
        iterations=values,
        pipeline_seconds=pipeline,
        sync_seconds=synced,
        update_seconds=update,
        bubble_share=1 - sum(busy.values()) / (len(busy) * pipeline) if pipeline > 0 else 0.0,
        busy_seconds=busy,
        in_flight_micro_batches={
            d: round(n) for d, n in _peaks(layout, np.ones(layout.chunks), continued=continued).items()
        },
        memory_bytes=memory_of(layout, continued=continued),
        pipeline_bytes=pipeline_bytes,
        sync_bytes=0.0 if layout.sync == "none" else _sync_bytes(layout) / every,
        samples_per_second=sum(layout.micro_batches) * layout.micro_batch_samples / mean if mean else 0.0,
        engine="events" if events else "longest path",
        timeline=spans,
    )


def memory_of(layout: Layout, *, continued: bool) -> dict[int, float]:
    """Device -> peak bytes; empty when the layout does not know its sizes."""
    if layout.in_flight_bytes is None or layout.static_bytes is None:
        return {}
    peaks = _peaks(layout, layout.in_flight_bytes, continued=continued)
    fixed = {
        device: float(layout.static_bytes[stage :: layout.stages].sum())
        for stage, row in enumerate(layout.grid)
        for device in row
    }
    return {device: peaks[device] + fixed[device] for device in peaks}


def _peaks(layout: Layout, bytes_of_chunk: Array, *, continued: bool) -> dict[int, float]:
    by_chunk = tuple(float(b) for b in bytes_of_chunk)

    def peaks(micro_batches: int) -> list[float]:
        return _peaks_of(layout.schedule, layout.stages, layout.virtual_stages, micro_batches, by_chunk)

    result = {}
    for replica, count in enumerate(layout.micro_batches):
        if continued and (found := steady.lengths(layout, count)) is not None:
            most = [found.continued(*pair) for pair in zip(peaks(found.low), peaks(found.high), strict=True)]
        else:
            most = peaks(count)
        result.update({layout.grid[stage][replica]: most[stage] for stage in range(layout.stages)})
    return result


@lru_cache(maxsize=1024)
def _peaks_of(schedule: str, stages: int, virtual: int, micro_batches: int, by_chunk: tuple[float, ...]) -> list[float]:
    ranks = order(schedule, stages, virtual, micro_batches)
    if virtual > 1:
        return [peak_bytes(ops, by_chunk) for ops in ranks]
    if min(by_chunk) != max(by_chunk) or by_chunk[0] != 1.0:  # one chunk a device: a count times its bytes
        counts = _peaks_of(schedule, stages, virtual, micro_batches, (1.0,) * stages)
        return [count * size for count, size in zip(counts, by_chunk, strict=True)]
    return [peak_bytes(ops, by_chunk) for ops in ranks]


def _busy(layout: Layout) -> dict[int, float]:
    work = layout.forward_seconds + layout.backward_seconds
    return {
        layout.grid[stage][replica]: float(work[stage :: layout.stages, replica].sum()) * layout.micro_batches[replica]
        for stage in range(layout.stages)
        for replica in range(layout.replicas)
    }


def _pieces(layout: Layout, chunk: int) -> int:
    return max(1, layout.buckets[chunk]) if layout.buckets else 1


def _traffic(layout: Layout) -> set[tuple[int, int]]:
    pairs = layout.pairs()
    for row in layout.grid:
        pairs |= collectives.pairs(layout.sync, row)
    return pairs


def _sync_bytes(layout: Layout) -> float:
    return sum(
        collectives.sent_bytes(layout, layout.sync, layout.grid[chunk % layout.stages], float(size))
        for chunk, size in enumerate(layout.gradient_bytes)
    )


def stall_table(graph: Template, layout: Layout, replicas: list[int], count: int, stall: Stall) -> Array:
    """[node, replica, iteration] seconds lost before each forward and backward, drawn in every rank's own order."""
    per_rank: list[list[int]] = [[] for _ in range(layout.stages)]
    for number, node in enumerate(graph.nodes):  # the topological order keeps every rank's own order
        if isinstance(node, Compute) and node.kind != Kind.WEIGHT:
            per_rank[node.rank].append(number)
    table = np.zeros((len(graph.nodes), len(replicas), count))
    for stage, numbers in enumerate(per_rank):
        for column, replica in enumerate(replicas):
            for iteration in range(count):
                for position, number in enumerate(numbers):
                    table[number, column, iteration] = stall(replica, stage, iteration * len(numbers) + position)
    return table


def _by_longest_path(
    layout: Layout, count: int, stall: Stall | None, *, timeline: bool, continued: bool
) -> tuple[_Moments, tuple[Span, ...]]:
    """Moments of `count` iterations where links are not shared: each computation begins as the latest that it waits
    for ends. `continued`: only so many micro-batches are timed as show what each further one adds."""
    compute, (occupied, latency) = layout.compute_table(), layout.message_tables()
    replicas, chunks = layout.replicas, layout.chunks
    last_end = np.zeros((chunks, replicas, count))
    last_seconds = np.zeros((chunks, replicas, count))
    pipeline = np.zeros((replicas, count))
    spans: list[Span] = []
    positions: list[int] = [0] * chunks
    for micro_batches in sorted(set(layout.micro_batches)):
        columns = [r for r in range(replicas) if layout.micro_batches[r] == micro_batches]
        found = steady.lengths(layout, micro_batches) if continued else None
        simulated = micro_batches if found is None else found.high
        graph = template(layout.schedule, layout.stages, layout.virtual_stages, simulated, layout.transport)
        tables = [table[:, :, columns, None] for table in (compute, occupied, latency)]
        stalls = None if stall is None else stall_table(graph, layout, columns, count, stall)
        costs = Costs(compute=tables[0], occupied=tables[1], latency=tables[2], stalls=stalls)
        timed = times(graph, costs)
        last = list(graph.last_backward)
        positions = last
        pipeline[columns], last_end[:, columns] = timed.end.max(axis=0), timed.end[last]
        if found is not None:
            short = template(layout.schedule, layout.stages, layout.virtual_stages, found.low, layout.transport)
            before = times(short, costs).end
            pipeline[columns] = found.continued(before.max(axis=0), pipeline[columns])
            last_end[:, columns] = found.continued(before[list(short.last_backward)], last_end[:, columns])
        kind = Kind.BACKWARD if graph.nodes[last[0]].kind == Kind.BACKWARD else Kind.WEIGHT  # type: ignore[union-attr]
        last_seconds[:, columns] = tables[0][kind]
        if timeline:
            for number, node in enumerate(graph.nodes):
                for column, replica in enumerate(columns):
                    at = float(timed.start[number, column, 0]), float(timed.end[number, column, 0])
                    spans.append(_span(layout, node, replica, *at))
    ends = [_exchange(layout, stage, positions, last_end, last_seconds) for stage in range(len(layout.grid))]
    synced = np.broadcast_to(pipeline.max(axis=0), (count,)).copy()
    for end, bars in ends:
        synced = np.maximum(synced, end)
        spans += bars if timeline else ()
    finished = synced + _update_seconds(layout)
    if timeline and (update := _update_seconds(layout)) > 0:
        spans += [
            Span(f"device {d}", "update", float(synced[0]), float(synced[0]) + update, 0, r)
            for row in layout.grid
            for r, d in enumerate(row)
        ]
    return _Moments(pipeline=pipeline.max(axis=0), synced=synced, finished=finished), tuple(spans)


def _exchange(
    layout: Layout, stage: int, positions: Sequence[int], last_end: np.ndarray, last_seconds: np.ndarray
) -> tuple[np.ndarray, list[Span]]:
    """When a stage's replicas have exchanged their gradients, (count,), and the first iteration's exchanges.

    `last_end`, `last_seconds`: end and length of the computation that makes each chunk's gradients, (chunks, replicas,
    count); `positions`: its number in the order of computations.
    """
    row, done, bars = layout.grid[stage], np.zeros(last_end.shape[2]), []
    for chunk in sorted(range(stage, layout.chunks, layout.stages), key=lambda chunk: positions[chunk]):
        pieces = _pieces(layout, chunk)
        each = collectives.seconds(layout, layout.sync, row, float(layout.gradient_bytes[chunk]) / pieces)
        each += layout.agreement_seconds if each > 0 else 0.0
        if each == 0:  # nothing takes time: all is there with the last piece
            done = np.maximum(last_end[chunk].max(axis=0), done)
            continue
        for piece in range(pieces):
            early = 1 - (piece + 1) / pieces if layout.overlap else 0.0
            begin = np.maximum((last_end[chunk] - last_seconds[chunk] * early).max(axis=0), done)
            done = begin + each
            bars.append(Span(f"stage {stage} replicas", "sync", float(begin[0]), float(done[0]), chunk, 0))
    return done, bars


def _by_events(layout: Layout, count: int, stall: Stall | None, *, timeline: bool) -> tuple[_Moments, tuple[Span, ...]]:
    """Moments of `count` iterations where flows share uplinks, event by event."""
    pipeline, synced = np.zeros(count), np.zeros(count)
    spans: list[Span] = []
    for iteration in range(count):
        built = assemble(layout, iteration, stall, [_pieces(layout, c) for c in range(layout.chunks)])
        start, end = run(built.tasks, [uplink.bytes_per_second for uplink in layout.uplinks])
        pipeline[iteration] = max(end[n] for n in built.pipeline)
        synced[iteration] = max(
            pipeline[iteration], max((end[n] + built.tasks[n].latency for n in built.sync), default=0.0)
        )
        if timeline and iteration == 0:
            spans = [
                Span(lane, name, float(start[n]), float(end[n]), chunk, replica)
                for n, (lane, name, chunk, replica) in built.labels.items()
            ]
    return _Moments(pipeline=pipeline, synced=synced, finished=synced + _update_seconds(layout)), tuple(spans)


def _continued(found: Lengths, low: Layout, high: Layout) -> _Moments:
    """By events, of the micro-batches that the two layouts stand for."""
    (before, _), (after, _) = (_by_events(layout, 1, None, timeline=False) for layout in (low, high))
    return _Moments(
        pipeline=found.continued(before.pipeline, after.pipeline),
        synced=found.continued(before.synced, after.synced),
        finished=found.continued(before.finished, after.finished),
    )


def _update_seconds(layout: Layout) -> float:
    if layout.optimizer_seconds is None:
        return layout.step_seconds
    own = max(layout.optimizer_seconds[s :: layout.stages].sum(axis=0).max() for s in range(layout.stages))
    return float(own) + layout.step_seconds


def _span(layout: Layout, node: Compute | Message, replica: int, start: float, end: float) -> Span:
    if isinstance(node, Compute):
        lane = f"device {layout.grid[node.rank][replica]}"
        return Span(lane, f"{LETTERS[node.kind]}{node.micro_batch}", start, end, node.chunk, replica)
    source, target = layout.grid[node.source][replica], layout.grid[node.target][replica]
    what = "act" if node.forward else "grad"
    name = f"{what} {node.micro_batch}"
    return Span(f"link {source} to {target}", name, start, end, node.cut, replica)
