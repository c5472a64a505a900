"""Overheads of a plan besides computing units and moving bytes: measured with the trainer's own parts, or zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from coordinator.problem.quantities import TIME, find, numbers
from facility.exchange.errors import ConfigurationError

Transport = Literal["streaming", "blocking"]
TRANSPORTS = ("streaming", "blocking")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How the trainer runs pipelines and replicas. The defaults are an ideal one."""

    transport: Transport = "streaming"
    """`streaming`: messages overlap computation; `blocking`: as torch.distributed.pipelining sends them."""
    overlap: bool = True
    """True if gradients travel between replicas while the last backward goes on; the trainer's go after it."""
    pass_seconds: float = 0.0
    """Of a stage's forward or backward of one micro-batch, whatever it holds: the schedule, its messages."""
    replica_forward_seconds: float = 0.0
    """Of every unit and micro-batch forward where all-reduce keeps replicas together (FSDP's hooks)."""
    replica_backward_seconds: float = 0.0
    agreement_seconds: float = 0.0
    """Of every unit that replicas agree on, besides latency and bytes: one collective."""
    step_seconds: float = 0.0
    """Of every optimizer step, under any plan: counting, clipping, the loss."""

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ConfigurationError(
                f"runtime.transport is {self.transport!r}, expected one of {', '.join(TRANSPORTS)}"
            )
        if not isinstance(self.overlap, bool):
            raise ConfigurationError(f"runtime.overlap is {self.overlap!r}, expected true or false")
        for name in SECONDS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"runtime.{name} is {value}, expected 0 or more")

    def pass_of(self, units: int, *, replicated: bool) -> tuple[float, float]:
        """Seconds added to the forward and to the backward of a stage of `units` units and one micro-batch."""
        if not replicated:
            return self.pass_seconds, self.pass_seconds
        return (
            self.pass_seconds + units * self.replica_forward_seconds,
            self.pass_seconds + units * self.replica_backward_seconds,
        )


SECONDS = tuple(field.name for field in fields(Runtime) if field.name.endswith("_seconds"))


def runtime_from_json(raw: Any, file: Path | str | None) -> Runtime:
    """`{"transport": "blocking", "overlap": false, "pass_ms": 1, ...}`; raises `ConfigurationError`."""
    if not isinstance(raw, Mapping):
        raise ConfigurationError(f"runtime is {raw!r:.60}, expected a mapping", file=file, key="runtime")
    values: dict[str, Any] = {}
    left = dict(raw)
    for name in SECONDS:
        stem = name.removesuffix("_seconds")
        if (found := find(raw, stem, TIME, where="runtime", file=file)) is not None:
            values[name] = float(numbers(raw[found[0]], f"runtime.{found[0]}", (), file)) * found[1]
            left.pop(found[0])
    for name in ("transport", "overlap"):
        if name in left:
            values[name] = left.pop(name)
    if left:
        known = ["transport", "overlap", *(name.replace("_seconds", "_<unit>") for name in SECONDS)]
        raise ConfigurationError(
            f"unknown key runtime.{next(iter(left))}; known keys are {', '.join(known)}", file=file
        )
    return Runtime(**values)
