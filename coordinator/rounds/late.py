"""A note for the receive step of a round that closed without a facility: why it left nothing, in the engine's words."""

from __future__ import annotations

import json
from pathlib import Path

from facility.exchange.files.durable import write_json

FOLDER = "late"
LONGEST = 200


def write_late(workdir: Path, round: int, facility: str, fate: str) -> None:
    """`workdir`: the coordinator's work directory, above those of its jobs."""
    folder = Path(workdir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{round}-{facility}.json", {"round": round, "facility": facility, "fate": fate})


def read_late(job_directory: Path, round: int, facility: str) -> str:
    """What happens to the late update; '' where the facility was not late. `job_directory`: of a coordinator's step."""
    path = Path(job_directory).parent / FOLDER / f"{round}-{facility}.json"
    try:
        return str(json.loads(path.read_text())["fate"])[:LONGEST]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
