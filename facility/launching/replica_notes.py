"""What each rank reports of its replica: by it the launcher knows which ranks the others can do without.

A rank leaves `replica-RANK.json` in the launcher's directory once its replica exchanges with others under a policy that
goes on without it, and again when it is one of those that finish the round. A rank that ends in between takes nothing
with it but its replica.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from facility.exchange.files.durable import write_json
from facility.exchange.json_values import values_in
from facility.launching.rendezvous import DIRECTORY


@dataclass(frozen=True, kw_only=True)
class ReplicaNote:
    """One rank's latest word."""

    replica: int
    finishes: bool = False
    """True from the final average on: the round now needs this rank."""


def note_replica(rank: int, note: ReplicaNote) -> None:
    """Write this rank's replica for its launcher, if there is one; `rank` as in RANK."""
    if directory := os.environ.get(DIRECTORY):
        write_json(_file(Path(directory), rank), asdict(note))


def read_note(directory: Path | None, rank: int) -> ReplicaNote | None:
    """The rank's latest note; None: every other rank needs it."""
    if directory is None:
        return None
    try:
        raw = values_in(_file(directory, rank))
        return ReplicaNote(replica=int(raw["replica"]), finishes=raw["finishes"] is True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget_note(directory: Path | None, rank: int) -> None:
    """Remove what an earlier start of the rank left."""
    if directory is not None:
        _file(directory, rank).unlink(missing_ok=True)


def _file(directory: Path, rank: int) -> Path:
    return directory / f"replica-{rank}.json"
