"""What the process that runs the workflow knows of its federation, and of the round that a command is for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from coordinator.config.settings import CoordinatorSettings, read_coordinator_settings
from facility.exchange.errors import CrossFedError


def settings_of_run(arguments: Sequence[str] | None = None) -> CoordinatorSettings | None:
    """`coordinator.json` beside the streamflow.yml that this process runs; None without one that can be read."""
    words = sys.argv if arguments is None else arguments
    files = [Path(word) for word in words if word.endswith("streamflow.yml")]
    described = files[0].resolve().parent / "coordinator.json" if files else None
    if described is None or not described.is_file():
        return None
    try:
        return read_coordinator_settings(described)
    except CrossFedError:
        return None  # the start step reports it


@dataclass(frozen=True, kw_only=True)
class RoundAtFacility:
    """The round that a facility's job is for."""

    facility: str
    number: int
    """As in the step's input; the number of rounds: the final evaluation."""
    workdir: Path
    """The coordinator's work directory."""


this_round: ContextVar[RoundAtFacility | None] = ContextVar("this_round", default=None)
"""Set where a facility's training step executes; None for any other command."""
