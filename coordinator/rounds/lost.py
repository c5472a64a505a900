"""Notes from which the receive step learns why a facility's job was taken for lost."""

from __future__ import annotations

from pathlib import Path

from coordinator.rounds.late import FOLDER, LONGEST, LOST
from facility.exchange.files.durable import write_json
from facility.exchange.json_values import values_in
from facility.exchange.messages.strict_json import clean_text


def write_lost(workdir: Path, round: int, facility: str, reason: str) -> None:
    """`workdir`: the coordinator's work directory, above those of its jobs."""
    path = _path(workdir, round, facility)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"reason": reason})


def read_lost(job_directory: Path, round: int, facility: str) -> str:
    """The reason, or '' where the job was not taken for lost. `job_directory`: of a coordinator's step."""
    try:
        return clean_text(str(values_in(_path(Path(job_directory).parent, round, facility))["reason"]), LONGEST)
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def drop_lost(workdir: Path, round: int, facility: str) -> None:
    """Forget why a job of this round was taken for lost: another one begins."""
    _path(workdir, round, facility).unlink(missing_ok=True)


def move_lost(workdir: Path, facility: str, *, before: int, now: int) -> None:
    """Round `now` has the job of an earlier round, and with it why that was taken for lost."""
    if (path := _path(workdir, before, facility)).exists():
        path.replace(_path(workdir, now, facility))


def _path(workdir: Path, round: int, facility: str) -> Path:
    return Path(workdir) / FOLDER / f"{LOST}{round}-{facility}.json"
