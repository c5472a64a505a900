"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""

from __future__ import annotations

from dataclasses import replace

from facility.exchange.schedules.ops import Kind, Op
from facility.exchange.schedules.registry import PipelineSchedule

DECLARATION = PipelineSchedule(
    name="gpipe",
    summary="all forwards, then all backwards",
    citation="Huang et al., GPipe, 2019 (arXiv 1811.06965)",
    implementation="gpipe",
    holds_all=True,
    torch_class="ScheduleGPipe",
)


def gpipe(stages: int, virtual_stages: int, micro_batches: int) -> tuple[tuple[Op, ...], ...]:
    """The ops of every rank."""
    return tuple(_rank(rank, micro_batches) for rank in range(stages))


def _rank(rank: int, micro_batches: int) -> tuple[Op, ...]:
    forwards = [Op(Kind.FORWARD, rank, m, receives_after=m - 1) for m in range(micro_batches)]
    backwards = [Op(Kind.BACKWARD, rank, m, receives_after=micro_batches + m - 1) for m in range(micro_batches)]
    backwards[0] = replace(backwards[0], waits_send_of=micro_batches - 1, waits_before_receiving=True)
    return (*forwards, *backwards)
