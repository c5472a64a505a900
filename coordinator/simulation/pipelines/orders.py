"""In which order a rank computes, and what it waits for: GPipe, 1F1B, interleaved 1F1B, interleaved zero bubble.

The orders are those that `torch.distributed.pipelining` executes, so that a simulation and the trainer agree:

- GPipe: Huang et al. 2019, arXiv 1811.06965;
- 1F1B: Narayanan et al., "PipeDream", SOSP 2019, in its flushing form;
- interleaved 1F1B: Narayanan et al. 2021, arXiv 2104.04473, section 2.2;
- interleaved zero bubble: Qi et al. 2023, arXiv 2401.10241, schedule ZB-1P: the backward is split into the part for the
  input and the part for the weights, and the latter fills bubbles.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

from facility.exchange.errors import ConfigurationError


class Kind(IntEnum):
    """What a rank computes."""

    FORWARD = 0
    BACKWARD = 1
    """Whole backward: for the input and for the weights."""
    INPUT = 2
    """Backward for the input only: what the previous chunk waits for."""
    WEIGHT = 3
    """Backward for the weights only: nobody waits for it."""


@dataclass(frozen=True, slots=True)
class Op:
    """One computation of one rank."""

    kind: Kind
    chunk: int
    """Position in the chain of chunks; chunk k runs on rank k % stages."""
    micro_batch: int
    waits_send_of: int = -1
    """Blocking transport: index of an earlier op of this rank whose message must have left before this one starts."""
    waits_before_receiving: bool = False
    """Blocking transport: that wait also comes before this op's receive is posted."""
    receives_after: int = -1
    """Blocking transport: this op's receive is posted when the op of this index has ended; -1: at the start."""


@lru_cache(maxsize=256)
def order(schedule: str, stages: int, virtual_stages: int, micro_batches: int) -> tuple[tuple[Op, ...], ...]:
    """The ops of every rank, in its order. Raises `ConfigurationError` for what the schedule cannot do."""
    if stages < 1 or virtual_stages < 1 or micro_batches < 1:
        raise ConfigurationError(
            f"stages={stages}, virtual_stages={virtual_stages}, micro_batches={micro_batches}, expected 1 or more each"
        )
    if schedule in ("gpipe", "1f1b"):
        if virtual_stages != 1:
            raise ConfigurationError(f"schedule {schedule!r} with virtual_stages={virtual_stages}, expected 1")
        single = _gpipe if schedule == "gpipe" else _1f1b
        return tuple(single(rank, stages, micro_batches) for rank in range(stages))
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        rounds = max(1, micro_batches // stages)
        if micro_batches % rounds:
            raise ConfigurationError(
                f"schedule {schedule!r} needs micro_batches ({micro_batches}) to be a multiple of "
                f"micro_batches // stages = {rounds}; {micro_batches - micro_batches % rounds} would do"
            )
        zero = schedule == "interleaved_zero_bubble"
        ranks = [_interleaved(rank, stages, virtual_stages, micro_batches, zero=zero) for rank in range(stages)]
        return _with_receives(ranks, stages, stages * virtual_stages)
    raise ConfigurationError(
        f"schedule is {schedule!r}, expected gpipe, 1f1b, interleaved_1f1b or interleaved_zero_bubble"
    )


def _gpipe(rank: int, stages: int, micro_batches: int) -> tuple[Op, ...]:
    forwards = [Op(Kind.FORWARD, rank, m, receives_after=m - 1) for m in range(micro_batches)]
    backwards = [Op(Kind.BACKWARD, rank, m, receives_after=micro_batches + m - 1) for m in range(micro_batches)]
    backwards[0] = replace(backwards[0], waits_send_of=micro_batches - 1, waits_before_receiving=True)
    return (*forwards, *backwards)


def _1f1b(rank: int, stages: int, micro_batches: int) -> tuple[Op, ...]:
    warmup = min(micro_batches, stages - rank)
    ops: list[Op] = []
    for m in range(warmup):  # a forward's message is awaited before the next one is sent
        ops.append(
            Op(Kind.FORWARD, rank, m, m - 2, True, m - 1) if m > 1 else Op(Kind.FORWARD, rank, m, -1, False, m - 1)
        )
    for m in range(micro_batches):
        steady = m + warmup <= micro_batches  # the preceding message and this receive were posted together
        here = len(ops)
        ops.append(
            Op(Kind.BACKWARD, rank, m, here - 1, False, here - 1)
            if steady
            else Op(Kind.BACKWARD, rank, m, here - 2, True, here - 1)
        )
        if m + warmup < micro_batches:
            ops.append(Op(Kind.FORWARD, rank, m + warmup, here, False, here))
    return tuple(ops)


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
