"""1F1B: one forward, one backward in turn, flushed at the end of a batch (Narayanan et al., "PipeDream", SOSP 2019)."""

from __future__ import annotations

from facility.exchange.schedules.ops import Kind, Op
from facility.exchange.schedules.registry import PipelineSchedule

DECLARATION = PipelineSchedule(
    name="1f1b",
    summary="one forward, one backward in turn",
    citation="Narayanan et al., PipeDream, SOSP 2019, in its flushing form",
    implementation="one_forward_one_backward",
    torch_class="Schedule1F1B",
)


def one_forward_one_backward(stages: int, virtual_stages: int, micro_batches: int) -> tuple[tuple[Op, ...], ...]:
    """The ops of every rank."""
    return tuple(_rank(rank, stages, micro_batches) for rank in range(stages))


def _rank(rank: int, stages: int, micro_batches: int) -> tuple[Op, ...]:
    warmup = min(micro_batches, stages - rank)
    ops: list[Op] = []
    for m in range(warmup):  # a forward's message is awaited before the next one is sent
        awaits = m > 1
        ops.append(
            Op(
                Kind.FORWARD,
                rank,
                m,
                waits_send_of=m - 2 if awaits else -1,
                waits_before_receiving=awaits,
                receives_after=m - 1,
            )
        )
    for m in range(micro_batches):
        steady = m + warmup <= micro_batches  # the preceding message and this receive were posted together
        here = len(ops)
        ops.append(
            Op(
                Kind.BACKWARD,
                rank,
                m,
                waits_send_of=here - 1 if steady else here - 2,
                waits_before_receiving=not steady,
                receives_after=here - 1,
            )
        )
        if m + warmup < micro_batches:
            ops.append(Op(Kind.FORWARD, rank, m + warmup, waits_send_of=here, receives_after=here))
    return tuple(ops)
