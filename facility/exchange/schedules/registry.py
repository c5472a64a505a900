"""The pipeline schedules by name.

A schedule is one file of this package: a `DECLARATION` and a function that orders what each rank computes, which the
simulator obeys; the trainer runs the class of `torch.distributed.pipelining` that the declaration names.
"""

from __future__ import annotations

from dataclasses import dataclass

from facility.exchange.registry import Declaration, Registry


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule(Declaration):
    """A schedule. Its implementation is `(stages, virtual_stages, micro_batches) -> the ops of each rank, in order`."""

    interleaved: bool = False
    """A rank may hold several chunks of the model (virtual stages)."""
    holds_all: bool = False
    """The activations of all micro-batches are in memory at once, not those of as many as there are stages."""
    torch_class: str = ""
    """Name of the class in `torch.distributed.pipelining.schedules`, or `package.module:Class` of one from these."""


SCHEDULES = Registry(
    kind="schedule",
    package="facility.exchange.schedules",
    entry_points="crossfed.pipeline_schedules",
    declaration=PipelineSchedule,
)


def is_interleaved(schedule: str) -> bool:
    """Whether a rank may hold several chunks of the model under this schedule."""
    return SCHEDULES.get(schedule).interleaved
