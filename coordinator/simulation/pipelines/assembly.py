"""All replicas of a layout, one iteration, as tasks for the event engine.

First each replica's pipeline: computations, and the messages between its stages. Then what the replicas of every stage
exchange. A task that waits for task t names 2 t for its end, or 2 t + 1 for the arrival of what it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.simulation.pipelines import collectives
from coordinator.simulation.pipelines.events import Task
from coordinator.simulation.pipelines.graph import Compute, template
from coordinator.simulation.pipelines.layout import Array, Layout
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


Ready = dict[tuple[int, int], list[int]]
"""(chunk, bucket of its gradients) -> the tasks of all replicas that make it."""


def assemble(
    layout: Layout, iteration: int, stall: Callable[[int, int, int], float] | None, pieces: list[int]
) -> Assembly:
    """Tasks of iteration number `iteration`. `pieces`: buckets of every chunk's gradients."""
    built = Assembly()
    compute = layout.compute_table()
    ready: Ready = {}
    order: list[int] = [0] * layout.chunks
    for replica in range(len(layout.micro_batches)):
        order = _add_pipeline(built, layout, compute, replica, iteration, stall, pieces, ready)
    for stage in range(len(layout.grid)):
        chunks = sorted(range(stage, layout.chunks, layout.stages), key=lambda chunk: order[chunk])
        _add_synchronisation(built, layout, stage, chunks, pieces, ready)
    return built


def _add_pipeline(
    built: Assembly,
    layout: Layout,
    compute: Array,
    replica: int,
    iteration: int,
    stall: Callable[[int, int, int], float] | None,
    pieces: list[int],
    ready: Ready,
) -> list[int]:
    """Add one replica's computations and messages, and to `ready` what makes its gradients.

    Returns for each chunk the number of the node that computes its gradients last.
    """
    graph = template(
        layout.schedule, layout.stages, layout.virtual_stages, layout.micro_batches[replica], layout.transport
    )
    chunk_of = {node: chunk for chunk, node in enumerate(graph.last_backward)}
    drawn = [iteration * count for count in _draws_per_rank(graph.nodes, layout.stages)]
    task_of: list[int] = []
    for number, node in enumerate(graph.nodes):
        waits = [2 * task_of[w // 2] + w % 2 for w in graph.waits[number]]
        if not isinstance(node, Compute):
            source, target = layout.grid[node.source][replica], layout.grid[node.target][replica]
            name = f"{'act' if node.forward else 'grad'} {node.micro_batch}"
            leg = collectives.Leg(source=source, target=target, bytes=float(layout.cut_bytes[node.cut]))
            task_of.append(_flow(built, layout, leg, waits, (name, node.cut, replica)))
            built.pipeline.append(task_of[-1])
            continue
        lost = 0.0
        if stall is not None and node.kind != Kind.WEIGHT:
            lost = stall(replica, node.rank, drawn[node.rank])
            drawn[node.rank] += 1
        seconds = float(compute[node.kind, node.chunk, replica])
        lane = f"device {layout.grid[node.rank][replica]}"
        label = (lane, f"{LETTERS[node.kind]}{node.micro_batch}", node.chunk, replica)
        makes_gradients = number in chunk_of
        # Buckets that are sent while the rest is computed are tasks of their own.
        parts = pieces[node.chunk] if makes_gradients and layout.overlap else 1
        for part in range(parts):
            task = built.add(Task(waits, seconds / parts + (lost if part == 0 else 0.0)), label)
            built.pipeline.append(task)
            waits = [2 * task]
            for bucket in [part] if layout.overlap else range(pieces[node.chunk]):
                if makes_gradients:
                    ready.setdefault((node.chunk, bucket), []).append(task)
        task_of.append(built.pipeline[-1])
    return list(graph.last_backward)


def _draws_per_rank(nodes: Sequence[object], stages: int) -> list[int]:
    """Random stalls that each rank draws in one iteration: one for each forward and backward pass."""
    drawing = [node.rank for node in nodes if isinstance(node, Compute) and node.kind != Kind.WEIGHT]
    return [drawing.count(stage) for stage in range(stages)]


def _add_synchronisation(
    built: Assembly, layout: Layout, stage: int, chunks: Sequence[int], pieces: list[int], ready: Ready
) -> None:
    """Add what a stage's replicas exchange, bucket by bucket, in the order in which their gradients are made."""
    before: list[int] = []
    for chunk in chunks:
        for piece in range(pieces[chunk]):
            size = float(layout.gradient_bytes[chunk]) / pieces[chunk]
            waits = [2 * task for task in ready[chunk, piece]] + before
            phases = collectives.phases(layout.sync, layout.grid[stage], size)
            if phases and layout.agreement_seconds:
                label = (f"stage {stage} replicas", "agree", chunk, -1)
                waits = [2 * built.add(Task(waits, layout.agreement_seconds), label)]
            for phase in phases:
                waits = _phase(built, layout, phase, waits, chunk)
                before = waits


def _phase(built: Assembly, layout: Layout, phase: collectives.Phase, waits: list[int], chunk: int) -> list[int]:
    """Add the flows of one phase; returns what its successor waits for."""
    ends = []
    for chain in phase:
        waiting = waits
        for leg in chain:
            flow = _flow(built, layout, leg, waiting, ("sync", chunk, -1))
            built.sync.append(flow)
            waiting = [2 * flow + 1]
        ends += waiting
    return ends


def _flow(built: Assembly, layout: Layout, leg: collectives.Leg, waits: list[int], what: tuple[str, int, int]) -> int:
    """Add the sending of a leg's bytes; returns its task. `what`: its name, chunk and replica on the timeline."""
    task = Task(
        waits,
        bytes=layout.sent_bytes(leg.source, leg.target, leg.bytes),
        bytes_per_second=float(layout.bandwidth[leg.source, leg.target]),
        latency=layout.delay(leg.source, leg.target, leg.bytes, leg.steps),
        uplinks=layout.uplinks_of(leg.source, leg.target),
    )
    return built.add(task, (f"link {leg.source} to {leg.target}", *what))
