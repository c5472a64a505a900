"""One iteration of one pipeline as a graph: computations and messages, and what each waits for.

Two transports. `streaming`: sends and receives run on separate streams, so a message leaves as soon as its computation
has ended and the link is free. `blocking`: as in `torch.distributed.pipelining` over gloo or NCCL, where a message
is sent only once its receive is posted and 1F1B waits for its own sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from coordinator.problem.runtime import Transport
from coordinator.simulation.pipelines.orders import order
from facility.exchange.schedules.ops import Kind, Op


@dataclass(frozen=True, slots=True)
class Compute:
    """A computation of a rank."""

    kind: Kind
    chunk: int
    micro_batch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Message:
    """What a computation sends: activations forwards, or gradients backwards, over the cut below `cut + 1`."""

    forward: bool
    cut: int
    """Between chunk `cut` and chunk `cut + 1`."""
    micro_batch: int
    source: int
    target: int


@dataclass(frozen=True)
class Template:
    """The graph of one replica, in topological order.

    A wait is a number: 2n is the end of node n (for a message: the moment its last byte left), 2n + 1 its arrival.
    """

    stages: int
    chunks: int
    micro_batches: int
    nodes: tuple[Compute | Message, ...]
    waits: tuple[tuple[int, ...], ...]
    last_backward: tuple[int, ...]
    """For every chunk the node after which its gradients are complete."""


@lru_cache(maxsize=256)
def template(
    schedule: str, stages: int, virtual_stages: int, micro_batches: int, transport: Transport = "streaming"
) -> Template:
    """Graph of one iteration of one replica."""
    draft = _Draft(order(schedule, stages, virtual_stages, micro_batches), stages, stages * virtual_stages)
    draft.add_computations()
    draft.add_messages()
    draft.add_waits(blocking=transport == "blocking")
    return draft.finished(micro_batches)


class _Draft:
    """A graph while it grows: nodes in the order of their making, and what each waits for."""

    def __init__(self, ranks: Sequence[Sequence[Op]], stages: int, chunks: int) -> None:
        self.ranks, self.stages, self.chunks = ranks, stages, chunks
        self.nodes: list[Compute | Message] = []
        self.waits: list[list[int]] = []
        self.of_rank: list[list[int]] = []
        """Nodes of a rank's computations, in its order."""
        self.produced: dict[tuple[bool, int, int], int] = {}
        """(forward?, chunk, micro-batch) -> the node that computes it."""
        self.sent_by: dict[int, int] = {}
        """Computation -> the message that takes its result away."""

    def add_computations(self) -> None:
        for rank, ops in enumerate(self.ranks):
            self.of_rank.append([])
            for op in ops:
                node = self._add(Compute(op.kind, op.chunk, op.micro_batch, rank), [])
                if op.kind != Kind.WEIGHT:
                    self.produced[op.kind == Kind.FORWARD, op.chunk, op.micro_batch] = node
                self.of_rank[rank].append(node)

    def add_messages(self) -> None:
        """One for each result that another rank needs; those between the same two ranks leave one after the other."""
        previous_on: dict[tuple[int, int], int] = {}
        for rank, ops in enumerate(self.ranks):
            for op, node in zip(ops, self.of_rank[rank], strict=True):
                forward = op.kind == Kind.FORWARD
                to = op.chunk + (1 if forward else -1)
                target = to % self.stages
                if op.kind == Kind.WEIGHT or not 0 <= to < self.chunks or target == rank:
                    continue
                waits = [2 * node]
                if (before := previous_on.get((rank, target))) is not None:
                    waits.append(2 * before)
                message = self._add(Message(forward, min(op.chunk, to), op.micro_batch, rank, target), waits)
                previous_on[rank, target] = self.sent_by[node] = message

    def add_waits(self, *, blocking: bool) -> None:
        """Each computation waits for its rank's one before it and for its input."""
        for rank, ops in enumerate(self.ranks):
            for number, (op, node) in enumerate(zip(ops, self.of_rank[rank], strict=True)):
                if number:
                    self.waits[node].append(2 * self.of_rank[rank][number - 1])
                posted = self._blocked(rank, op, node) if blocking else []
                source = _source(op.kind, op.chunk, self.chunks)
                if source is None:
                    continue
                origin = self.produced[op.kind == Kind.FORWARD, source, op.micro_batch]
                if (message := self.sent_by.get(origin)) is not None:
                    self.waits[node].append(2 * message + 1)
                    self.waits[message].extend(posted)
                else:
                    self.waits[node].append(2 * origin)

    def _blocked(self, rank: int, op: Op, node: int) -> list[int]:
        """Let `node` wait for the send that blocks it; returns what its own receive is posted after."""
        posted = []
        if op.waits_send_of >= 0 and (sent := self.sent_by.get(self.of_rank[rank][op.waits_send_of])) is not None:
            self.waits[node].append(2 * sent)
            if op.waits_before_receiving:
                posted.append(2 * sent)
        if op.receives_after >= 0:
            posted.append(2 * self.of_rank[rank][op.receives_after])
        return posted

    def finished(self, micro_batches: int) -> Template:
        """The graph in topological order."""
        sequence = _sorted(self.waits)
        number_of = {node: position for position, node in enumerate(sequence)}
        ordered = tuple(self.nodes[n] for n in sequence)
        last: dict[int, int] = {}
        for position, item in enumerate(ordered):
            if isinstance(item, Compute) and item.kind in (Kind.BACKWARD, Kind.WEIGHT):
                last[item.chunk] = position
        return Template(
            stages=self.stages,
            chunks=self.chunks,
            micro_batches=micro_batches,
            nodes=ordered,
            waits=tuple(tuple(sorted({2 * number_of[w // 2] + w % 2 for w in self.waits[n]})) for n in sequence),
            last_backward=tuple(last[c] for c in range(self.chunks)),
        )

    def _add(self, node: Compute | Message, waits: list[int]) -> int:
        self.nodes.append(node)
        self.waits.append(waits)
        return len(self.nodes) - 1


def _source(kind: Kind, chunk: int, chunks: int) -> int | None:
    """The other chunk whose output an op needs; its own forward and backward precede it in its rank's order."""
    if kind == Kind.FORWARD:
        return chunk - 1 if chunk else None
    if kind == Kind.WEIGHT or chunk == chunks - 1:
        return None
    return chunk + 1


def _sorted(waits: list[list[int]]) -> list[int]:
    """Topological order (Kahn); an assertion when something waits for itself."""
    followers: dict[int, list[int]] = defaultdict(list)
    missing = [len(w) for w in waits]
    for node, needed in enumerate(waits):
        for wait in needed:
            followers[wait // 2].append(node)
    ready = [n for n, count in enumerate(missing) if not count]
    result: list[int] = []
    while ready:
        node = ready.pop()
        result.append(node)
        for follower in followers[node]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    assert len(result) == len(waits), "the schedule waits for itself"
    return result
