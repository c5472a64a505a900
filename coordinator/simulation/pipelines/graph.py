"""One iteration of one pipeline as a graph: computations and messages, and what each waits for.

Two transports. `streaming`: sends and receives run on separate streams, so a message leaves as soon as its computation
has ended and the link is free. `blocking`: as in `torch.distributed.pipelining` over gloo or NCCL, where a message
is sent only once its receive is posted and 1F1B waits for its own sends.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from coordinator.simulation.pipelines.orders import order
from facility.exchange.schedules.ops import Kind

Transport = Literal["streaming", "blocking"]


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
    blocking = transport == "blocking"
    chunks = stages * virtual_stages
    ranks = order(schedule, stages, virtual_stages, micro_batches)
    nodes: list[Compute | Message] = []
    produced: dict[tuple[bool, int, int], int] = {}  # (forward?, chunk, micro-batch) -> node
    of_rank: list[list[int]] = []
    for rank, ops in enumerate(ranks):
        of_rank.append([])
        for op in ops:
            if op.kind != Kind.WEIGHT:
                produced[op.kind == Kind.FORWARD, op.chunk, op.micro_batch] = len(nodes)
            of_rank[rank].append(len(nodes))
            nodes.append(Compute(op.kind, op.chunk, op.micro_batch, rank))
    waits: list[list[int]] = [[] for _ in nodes]
    sent_by: dict[int, int] = {}
    previous_on: dict[tuple[int, int], int] = {}
    for rank, ops in enumerate(ranks):
        for op, node in zip(ops, of_rank[rank], strict=True):
            forward = op.kind == Kind.FORWARD
            to = op.chunk + (1 if forward else -1)
            if op.kind == Kind.WEIGHT or not 0 <= to < chunks or to % stages == rank:
                continue
            message = len(nodes)
            nodes.append(Message(forward, min(op.chunk, to), op.micro_batch, rank, to % stages))
            waits.append([2 * node])
            if (before := previous_on.get((rank, to % stages))) is not None:
                waits[message].append(2 * before)
            previous_on[rank, to % stages] = sent_by[node] = message
    for rank, ops in enumerate(ranks):
        for number, (op, node) in enumerate(zip(ops, of_rank[rank], strict=True)):
            if number:
                waits[node].append(2 * of_rank[rank][number - 1])
            posted = []
            if (
                blocking
                and op.waits_send_of >= 0
                and (sent := sent_by.get(of_rank[rank][op.waits_send_of])) is not None
            ):
                waits[node].append(2 * sent)
                if op.waits_before_receiving:
                    posted.append(2 * sent)
            if blocking and op.receives_after >= 0:
                posted.append(2 * of_rank[rank][op.receives_after])
            source = _source(op.kind, op.chunk, chunks)
            if source is None:
                continue
            origin = produced[op.kind == Kind.FORWARD, source, op.micro_batch]
            if (message_node := sent_by.get(origin)) is not None:
                waits[node].append(2 * message_node + 1)
                waits[message_node].extend(posted)
            else:
                waits[node].append(2 * origin)
    sequence = _sorted(waits)
    number_of = {node: position for position, node in enumerate(sequence)}
    ordered = tuple(nodes[n] for n in sequence)
    last: dict[int, int] = {}
    for position, item in enumerate(ordered):
        if isinstance(item, Compute) and item.kind in (Kind.BACKWARD, Kind.WEIGHT):
            last[item.chunk] = position
    return Template(
        stages=stages,
        chunks=chunks,
        micro_batches=micro_batches,
        nodes=ordered,
        waits=tuple(tuple(sorted({2 * number_of[w // 2] + w % 2 for w in waits[n]})) for n in sequence),
        last_backward=tuple(last[c] for c in range(chunks)),
    )


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
