"""All replicas of a layout, one iteration, as tasks for the event engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.simulation.pipelines import collectives
from coordinator.simulation.pipelines.events import Task
from coordinator.simulation.pipelines.graph import Compute, template
from coordinator.simulation.pipelines.layout import Layout
from facility.exchange.schedules.ops import Kind

LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT: "I", Kind.WEIGHT: "W"}


@dataclass
class Assembly:
    """Tasks and what they are."""

    tasks: list[Task] = field(default_factory=list)
    pipeline: list[int] = field(default_factory=list)
    """Computations and messages of the pipelines."""
    sync: list[int] = field(default_factory=list)
    """Flows between replicas."""
    labels: dict[int, tuple[str, str, int, int]] = field(default_factory=dict)
    """Task -> lane, name, chunk, replica."""

    def add(self, task: Task, label: tuple[str, str, int, int]) -> int:
        self.tasks.append(task)
        self.labels[len(self.tasks) - 1] = label
        return len(self.tasks) - 1


def assemble(
    layout: Layout, iteration: int, stall: Callable[[int, int, int], float] | None, pieces: list[int]
) -> Assembly:
    """Tasks of iteration number `iteration`. `pieces`: buckets of every chunk's gradients."""
    built = Assembly()
    compute = layout.compute_table()
    ready: dict[tuple[int, int], list[int]] = {}  # (chunk, piece) -> the tasks of all replicas it waits for
    sequence: list[int] = [0] * layout.chunks
    for replica, micro_batches in enumerate(layout.micro_batches):
        graph = template(layout.schedule, layout.stages, layout.virtual_stages, micro_batches, layout.transport)
        last = {node: chunk for chunk, node in enumerate(graph.last_backward)}
        for number, chunk in last.items():
            sequence[chunk] = number
        task_of: list[int] = []
        per_rank = [
            sum(1 for n in graph.nodes if isinstance(n, Compute) and n.rank == s and n.kind != Kind.WEIGHT)
            for s in range(layout.stages)
        ]
        drawn = [iteration * count for count in per_rank]
        for number, node in enumerate(graph.nodes):
            waits = [2 * task_of[w // 2] + w % 2 for w in graph.waits[number]]
            if not isinstance(node, Compute):
                source, target = layout.grid[node.source][replica], layout.grid[node.target][replica]
                name = f"{'act' if node.forward else 'grad'} {node.micro_batch}"
                size = float(layout.cut_bytes[node.cut])
                task_of.append(_flow(built, layout, source, target, size, 1, waits, name, node.cut, replica))
                built.pipeline.append(task_of[-1])
                continue
            seconds = float(compute[node.kind, node.chunk, replica])
            lost = 0.0
            if stall is not None and node.kind != Kind.WEIGHT:
                lost = stall(replica, node.rank, drawn[node.rank])
                drawn[node.rank] += 1
            lane = f"device {layout.grid[node.rank][replica]}"
            label = (lane, f"{LETTERS[node.kind]}{node.micro_batch}", node.chunk, replica)
            parts = pieces[node.chunk] if number in last and layout.overlap else 1
            for piece in range(parts):
                task = Task(waits, seconds / parts + (lost if piece == 0 else 0.0))
                task_number = built.add(task, label)
                built.pipeline.append(task_number)
                waits = [2 * task_number]
                if number in last:
                    for bucket in [piece] if layout.overlap else range(pieces[node.chunk]):
                        ready.setdefault((node.chunk, bucket), []).append(task_number)
            task_of.append(built.pipeline[-1])
    for stage, row in enumerate(layout.grid):
        before: list[int] = []
        for chunk in sorted(range(stage, layout.chunks, layout.stages), key=lambda c: sequence[c]):
            for piece in range(pieces[chunk]):
                size = float(layout.gradient_bytes[chunk]) / pieces[chunk]
                waits = [2 * t for t in ready[chunk, piece]] + before
                phases = collectives.phases(layout.sync, row, size)
                if phases and layout.agreement_seconds:
                    label = (f"stage {stage} replicas", "agree", chunk, -1)
                    waits = [2 * built.add(Task(waits, layout.agreement_seconds), label)]
                for phase in phases:
                    waits = _phase(built, layout, phase, waits, chunk)
                    before = waits
    return built


def _phase(built: Assembly, layout: Layout, phase: collectives.Phase, waits: list[int], chunk: int) -> list[int]:
    """Add the flows of one phase; returns what its successor waits for."""
    ends = []
    for chain in phase:
        waiting = waits
        for leg in chain:
            flow = _flow(built, layout, leg.source, leg.target, leg.bytes, leg.steps, waiting, "sync", chunk, -1)
            built.sync.append(flow)
            waiting = [2 * flow + 1]
        ends += waiting
    return ends


def _flow(
    built: Assembly,
    layout: Layout,
    source: int,
    target: int,
    size: float,
    steps: int,
    waits: list[int],
    name: str,
    chunk: int,
    replica: int,
) -> int:
    task = Task(
        waits,
        bytes=layout.sent_bytes(source, target, size),
        bytes_per_second=float(layout.bandwidth[source, target]),
        latency=layout.delay(source, target, size, steps),
        uplinks=layout.uplinks_of(source, target),
    )
    return built.add(task, (f"link {source} to {target}", name, chunk, replica))
