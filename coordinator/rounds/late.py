"""What the coordinator remembers of late facilities on its disk: jobs whose update is still to come, and notes.

A note gives the receive step of a round that closed without a facility the reason. A late job is remembered
until its update was used, so that a coordinator that is killed finds it again.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from coordinator.archive.rounds import Wait
from facility.exchange.files.durable import append_lines, write_json
from facility.exchange.json_values import values_in

WORKDIR = "coordinator"
"""Folder of the federation's work directory in which the coordinator's own steps work and remember."""
FOLDER = "late"
LONGEST = 300
TIMES = "times.json"
SINCE = "times.jsonl"
"""What was noted after `TIMES`, a line each."""
WAIT = "wait.json"
JOB = "job-"
DISCOUNTED = "discounted.json"
LOST = "lost-"
"""Begins the notes of `coordinator.rounds.lost`."""


@dataclass(frozen=True, kw_only=True)
class LateJob:
    """A job that its round did not wait for."""

    facility: str
    round: int
    """Of the model that it trains from."""
    directory: str
    """Its own directory at the facility, in which the update will be."""
    handed: int | None = None
    """The round to which its update was handed on; None: to none yet."""


def write_late(workdir: Path, round: int, facility: str, reason: str) -> None:
    """`workdir`: the coordinator's work directory, above those of its jobs."""
    write_json(_folder(workdir) / f"{round}-{facility}.json", {"round": round, "facility": facility, "reason": reason})


def read_late(job_directory: Path, round: int, facility: str) -> str:
    """Why the round closed without the facility; '' where it was not late. `job_directory`: of a coordinator's step."""
    path = Path(job_directory).parent / FOLDER / f"{round}-{facility}.json"
    try:
        return str(values_in(path)["reason"])[:LONGEST]
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def drop_late(workdir: Path, round: int, facility: str) -> None:
    """Forget the note: the facility is in time for this attempt at the round."""
    (Path(workdir) / FOLDER / f"{round}-{facility}.json").unlink(missing_ok=True)


def remember_job(workdir: Path, job: LateJob) -> None:
    """Note a facility's job that goes on after its round was closed, in place of an earlier one."""
    write_json(_folder(workdir) / f"{JOB}{job.facility}.json", asdict(job))


def forget_job(workdir: Path, facility: str) -> None:
    """Forget the late job of a facility, if there is one."""
    (Path(workdir) / FOLDER / f"{JOB}{facility}.json").unlink(missing_ok=True)


def handed_on(workdir: Path, facility: str, number: int) -> None:
    """Note that round `number` has the facility's late update: a later one must not use it again."""
    if (job := remembered_job(workdir, facility)) is not None:
        remember_job(workdir, replace(job, handed=number))


def remembered_job(workdir: Path, facility: str) -> LateJob | None:
    """What an earlier run, or this one, left at work there."""
    try:
        raw = values_in(Path(workdir) / FOLDER / f"{JOB}{facility}.json")
        handed = raw["handed"]
        return LateJob(
            facility=facility,
            round=int(raw["round"]),
            directory=str(raw["directory"]),
            handed=None if handed is None else int(handed),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget_jobs(workdir: Path, staying: Collection[str]) -> list[LateJob]:
    """The jobs whose updates were still to come, of all facilities but those that stay in rounds that carry them."""
    names = [
        path.name.removeprefix(JOB).removesuffix(".json") for path in (Path(workdir) / FOLDER).glob(f"{JOB}*.json")
    ]
    names = [name for name in names if name not in staying]
    found = [job for name in sorted(names) if (job := remembered_job(workdir, name)) is not None]
    for name in names:
        forget_job(workdir, name)
    return [job for job in found if job.handed is None]


def forget_all(workdir: Path) -> None:
    """For a new federation in a work directory that an earlier one used."""
    folder = Path(workdir) / FOLDER
    for path in [
        *folder.glob(f"{JOB}*.json"),
        *folder.glob(f"{LOST}*.json"),
        folder / TIMES,
        folder / SINCE,
        folder / WAIT,
        folder / DISCOUNTED,
    ]:
        path.unlink(missing_ok=True)


def discount(workdir: Path, number: int, names: Collection[str]) -> None:
    """Note that what these facilities deliver in round `number` makes no quorum: it was refused."""
    facilities = sorted({*names, *discounted(workdir, number)})
    write_json(_folder(workdir) / DISCOUNTED, {"round": number, "facilities": facilities})


def discounted(workdir: Path, number: int) -> set[str]:
    """The facilities so noted; {} for another round."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        raw = values_in(Path(workdir) / FOLDER / DISCOUNTED)
        return {str(name) for name in raw["facilities"]} if raw["round"] == number else set()
    return set()


def forget_discounted(workdir: Path) -> None:
    """No attempt at the round under way has been made: what is noted is of one that `crossfed rewind` set aside."""
    (Path(workdir) / FOLDER / DISCOUNTED).unlink(missing_ok=True)


def write_times(workdir: Path, times: dict[int, dict[str, float]]) -> None:
    """Seconds that each facility needed, by round and facility: what `grace: auto` learns from. Takes the place of
    what was noted before."""
    write_json(_folder(workdir) / TIMES, {str(number): seconds for number, seconds in times.items()})
    (_folder(workdir) / SINCE).unlink(missing_ok=True)


def add_time(workdir: Path, number: int, facility: str, seconds: float) -> None:
    """Note one more: a line, whatever is noted already. One that a power cut takes is missing, and no more."""
    line = json.dumps({"round": number, "facility": facility, "seconds": seconds}) + "\n"
    append_lines(_folder(workdir) / SINCE, line)


def read_times(workdir: Path) -> dict[int, dict[str, float]]:
    """Job times of earlier runs, by round and facility; {} where nothing can be read."""
    found: dict[int, dict[str, float]] = {}
    folder = Path(workdir) / FOLDER
    with suppress(OSError, ValueError, AttributeError, TypeError):
        raw = values_in(folder / TIMES)
        found = {int(number): {str(name): float(one) for name, one in times.items()} for number, times in raw.items()}
    with suppress(OSError):
        for line in (folder / SINCE).read_bytes().splitlines():
            with suppress(ValueError, KeyError, TypeError):
                one = json.loads(line)
                found.setdefault(int(one["round"]), {})[str(one["facility"])] = float(one["seconds"])
    return found


def write_wait(workdir: Path, round: int, wait: Wait | None) -> None:
    """Note how long the round stays open from its quorum on; None: it has begun, and nothing is known of that yet."""
    write_json(_folder(workdir) / WAIT, {"round": round, "wait": None if wait is None else asdict(wait)})


def read_wait(job_directory: Path, round: int) -> Wait | None:
    """What was noted of this round. `job_directory`: of a coordinator's step."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        raw = values_in(Path(job_directory).parent / FOLDER / WAIT)
        return Wait(**raw["wait"]) if raw["round"] == round and raw["wait"] is not None else None
    return None


def _folder(workdir: Path) -> Path:
    folder = Path(workdir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder
