"""Interleaved zero bubble: the backward is split in two (Qi et al. 2023, arXiv 2401.10241, schedule ZB-1P)."""

from __future__ import annotations

from facility.exchange.schedules.looped import looped_order
from facility.exchange.schedules.ops import Op
from facility.exchange.schedules.registry import PipelineSchedule

DECLARATION = PipelineSchedule(
    name="interleaved_zero_bubble",
    summary="interleaved 1F1B with the backward split, whose part for the weights fills bubbles",
    citation="Qi et al. 2023 (arXiv 2401.10241), schedule ZB-1P",
    implementation="interleaved_zero_bubble",
    interleaved=True,
    torch_class="ScheduleInterleavedZeroBubble",
)


def interleaved_zero_bubble(stages: int, virtual_stages: int, micro_batches: int) -> tuple[tuple[Op, ...], ...]:
    """The ops of every rank."""
    return looped_order("interleaved_zero_bubble", stages, virtual_stages, micro_batches, zero=True)
