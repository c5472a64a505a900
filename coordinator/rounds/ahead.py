"""What the coordinator remembers on its disk of jobs that are submitted ahead of their models, by facility.

A placeholder is remembered before it is submitted and forgotten once it has its round: a coordinator that is killed
finds one that still waits, and never takes a job that was given a round for it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from coordinator.rounds.ahead_time import Seen
from facility.exchange.files.durable import write_json
from facility.exchange.json_values import values_in
from facility.exchange.messages.ahead import Waited
from facility.exchange.text import number_of

FOLDER = "ahead"
SEEN = "seen"
"""Folder below it, with what was observed."""


@dataclass(frozen=True, kw_only=True)
class Placeholder:
    """A job in the queue, or about to be submitted, that has no round yet."""

    directory: str
    """Made for it alone, at the facility."""
    template: str
    """SHA-256 of the job template that it was made from."""
    job: str = ""
    """Its id; empty: its submission was not answered yet."""
    placed: float = 0.0
    """When it was submitted, in seconds since 1970."""


def waited_sentence(waited: Waited, facility: str, job: str) -> str:
    """What is said of a job that waited for its model."""
    end = "got its round" if waited.handed else "ended without one"
    lost = f"{waited.seconds:.0f} s on {number_of(waited.nodes, 'node')}"
    return f"{facility}: job {job}, submitted ahead, waited {lost} and {end}"


def remember_placeholder(workdir: Path, facility: str, one: Placeholder) -> None:
    """`workdir`: the coordinator's work directory."""
    write_json(_file(workdir, f"{facility}.json"), asdict(one))


def forget_placeholder(workdir: Path, facility: str) -> None:
    """Forget the placeholder of a facility, if there is one."""
    (Path(workdir) / FOLDER / f"{facility}.json").unlink(missing_ok=True)


def remembered_placeholder(workdir: Path, facility: str) -> Placeholder | None:
    """What this run, or an earlier one, left in the queue."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        raw = values_in(Path(workdir) / FOLDER / f"{facility}.json")
        return Placeholder(
            directory=str(raw["directory"]),
            template=str(raw["template"]),
            job=str(raw["job"]),
            placed=float(raw["placed"]),
        )
    return None


def facilities_ahead(workdir: Path) -> set[str]:
    """Facilities whose placeholder job is remembered in the work directory."""
    return {path.stem for path in (Path(workdir) / FOLDER).glob("*.json")}


def write_seen(workdir: Path, facility: str, seen: Seen) -> None:
    """What was observed of a facility's queue, for later runs. A disk that is full stops no federation."""
    with suppress(OSError):
        write_json(_file(workdir, f"{SEEN}/{facility}.json"), asdict(seen))


def read_seen(workdir: Path, facility: str) -> Seen:
    """What earlier runs saw of a facility's queue; an empty record where it cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        raw = values_in(Path(workdir) / FOLDER / f"{SEEN}/{facility}.json")
        waits, spans, runs = ([float(one) for one in raw[name]] for name in ("waits", "spans", "runs"))
        worked, lost = (float(raw.get(name, 0.0)) for name in ("worked", "lost"))  # earlier versions kept none
        return Seen(waits=waits, spans=spans, runs=runs, worked=worked, lost=lost)
    return Seen()


def _file(workdir: Path, name: str) -> Path:
    path = Path(workdir) / FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
