"""A user's own pipeline schedule, in a module that is not part of the package: its declaration and order of ops."""

from __future__ import annotations

from facility.exchange.schedules.gpipe import gpipe
from facility.exchange.schedules.ops import Op
from facility.exchange.schedules.registry import PipelineSchedule

DECLARATION = PipelineSchedule(
    name="forwards_first",
    summary="all forwards, then all backwards, said aloud",
    implementation="forwards_first",
    holds_all=True,
    torch_class="tests.training.outside_schedule_class:ForwardsFirst",
)


def forwards_first(stages: int, virtual_stages: int, micro_batches: int) -> tuple[tuple[Op, ...], ...]:
    """The ops of every rank."""
    return gpipe(stages, virtual_stages, micro_batches)
