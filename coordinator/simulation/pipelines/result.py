"""The result of a simulation of iterations."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a timeline, seconds."""

    lane: str
    """`device 3`, or `link 3 to 4`."""
    name: str
    """`F2` forward of micro-batch 2, `B2` backward, `I2` and `W2` its halves, `act 2`, `grad 2`, `sync`, `update`."""
    start: float
    end: float
    chunk: int
    replica: int


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Seconds are per iteration, means over the simulated iterations."""

    iteration_seconds: float
    iterations: tuple[float, ...]
    """Every simulated iteration."""
    pipeline_seconds: float
    """Until the last backward has ended."""
    sync_seconds: float
    """What synchronising replicas adds to that: its part that nothing hides."""
    update_seconds: float
    """What the optimizer's step adds."""
    bubble_share: float
    """Idle share of the devices until the last backward has ended; (S - 1) / (M + S - 1) for uniform stages."""
    busy_seconds: dict[int, float]
    """Device -> seconds computing."""
    in_flight_micro_batches: dict[int, int]
    """Device -> largest number of micro-batch activations it holds at once (counting every chunk)."""
    memory_bytes: dict[int, float]
    """Device -> peak of parameters, gradients, optimizer state and in-flight activations; {} when sizes are unknown."""
    pipeline_bytes: float
    """Between stages, all links together."""
    sync_bytes: float
    """Between replicas, all links together."""
    samples_per_second: float
    engine: str
    """`longest path` (no link is shared) or `events`."""
    timeline: tuple[Span, ...] = ()
    """The first iteration, when asked for."""

    def to_json(self) -> dict[str, Any]:
        """Plain values without the timeline."""
        values = dataclasses.asdict(dataclasses.replace(self, timeline=()))
        del values["timeline"]
        for key in ("busy_seconds", "in_flight_micro_batches", "memory_bytes"):
            values[key] = {str(device): value for device, value in values[key].items()}
        return values
