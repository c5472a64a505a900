"""Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

from facility.exchange.schedules.looped import looped_order
from facility.exchange.schedules.ops import Op
from facility.exchange.schedules.registry import PipelineSchedule

DECLARATION = PipelineSchedule(
    name="interleaved_1f1b",
    summary="1F1B over several chunks of the model on each rank",
    citation="Narayanan et al. 2021 (arXiv 2104.04473), section 2.2",
    implementation="interleaved_1f1b",
    interleaved=True,
    torch_class="ScheduleInterleaved1F1B",
)


def interleaved_1f1b(stages: int, virtual_stages: int, micro_batches: int) -> tuple[tuple[Op, ...], ...]:
    """The ops of every rank."""
    return looped_order("interleaved_1f1b", stages, virtual_stages, micro_batches, zero=False)
