"""Interleaved schedules: a rank holds several chunks of the chain and goes through them in turn."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from facility.exchange.errors import ConfigurationError
from facility.exchange.schedules.ops import Kind, Op


def looped_order(
    schedule: str, stages: int, virtual_stages: int, micro_batches: int, *, zero: bool
) -> tuple[tuple[Op, ...], ...]:
    """The ops of every rank; `zero`: the backward is split, and its part for the weights fills bubbles."""
    rounds = max(1, micro_batches // stages)
    if micro_batches % rounds:
        raise ConfigurationError(
            f"schedule {schedule!r} needs micro_batches ({micro_batches}) to be a multiple of "
            f"micro_batches // stages = {rounds}; {micro_batches - micro_batches % rounds} would do"
        )
    ranks = [_interleaved(rank, stages, virtual_stages, micro_batches, zero=zero) for rank in range(stages)]
    return _with_receives(ranks, stages, stages * virtual_stages)


def _interleaved(rank: int, stages: int, virtual: int, micro_batches: int, *, zero: bool) -> list[Op]:
    rounds = max(1, micro_batches // stages)
    a_round = micro_batches // rounds
    total = virtual * micro_batches
    warmup = min((virtual - 1) * a_round + (1 if zero else 2) * (stages - 1 - rank), total)
    counts: dict[tuple[Kind, int], int] = defaultdict(int)
    ops: list[Op] = []

    def add(kind: Kind, local: int) -> None:
        chunk = local * stages + rank
        ops.append(Op(kind, chunk, counts[kind, chunk]))
        counts[kind, chunk] += 1

    def backward_local(step: int) -> int:
        return virtual - 1 - ((step - warmup) // a_round) % virtual

    weights_done = 0
    for step in range(total + warmup):
        if step < total:
            add(Kind.FORWARD, (step // a_round) % virtual)
        if step >= warmup:
            add(Kind.INPUT if zero else Kind.BACKWARD, backward_local(step))
            if zero and step - warmup >= rank:
                add(Kind.WEIGHT, backward_local(warmup + weights_done))
                weights_done += 1
    while zero and weights_done < total:
        add(Kind.WEIGHT, backward_local(warmup + weights_done))
        weights_done += 1
    return ops


def _with_receives(ranks: list[list[Op]], stages: int, chunks: int) -> tuple[tuple[Op, ...], ...]:
    """Where the looped runtime posts each receive: as soon as the sender's op is scheduled, in lock step over ranks."""
    position = [0] * stages
    posted: dict[tuple[bool, int, int], int] = {}  # (forward?, chunk, micro-batch) -> ops scheduled on the receiver
    done: set[tuple[bool, int, int]] = set()
    result: list[list[Op]] = [[] for _ in range(stages)]
    while any(position[r] < len(ranks[r]) for r in range(stages)):
        progress = False
        for rank in range(stages):
            if position[rank] == len(ranks[rank]):
                continue
            op = ranks[rank][position[rank]]
            forward = op.kind == Kind.FORWARD
            first = op.chunk == 0 if forward else op.chunk == chunks - 1
            source = (forward, op.chunk - 1 if forward else op.chunk + 1, op.micro_batch)
            if op.kind != Kind.WEIGHT and not first and source not in done:
                continue
            key = (forward, op.chunk, op.micro_batch)
            result[rank].append(replace(op, receives_after=posted.get(key, 0) - 1))
            position[rank] += 1
            progress = True
            if op.kind != Kind.WEIGHT:
                done.add(key)
                target = op.chunk + (1 if forward else -1)
                if 0 <= target < chunks:
                    posted[forward, target, op.micro_batch] = len(result[target % stages])
        assert progress, "the schedule waits for itself"
    return tuple(tuple(ops) for ops in result)
