"""What a facility no longer needs, so that its disk holds two models, one update and one optimizer state at most.

The model of round r exists only after every update of round r - 1 was averaged or given up: at the start of round r
no earlier update is of use. Once round r is finished and kept, no earlier optimizer state or residual is: the same
round asked for again is answered with the kept update.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from facility.exchange.errors import ManifestError
from facility.exchange.files.durable import write_json
from facility.exchange.files.sweep import sweep_engine_directories, sweep_job_directories
from facility.exchange.messages.comparison import MODELS
from facility.exchange.messages.manifest import NAME, Manifest, manifest_if_any
from facility.exchange.messages.settings import FacilitySettings
from facility.exchange.messages.strict_json import Fields, read_json
from facility.rounds.kept import by_round

NOTE = ".crossfed-job.json"
"""In a job's directory: whose it is, its round, and the name of its temporary directory."""
KEPT_JOBS = 10
"""Rounds whose jobs' directories stay, with what the jobs printed."""


def remove_old_rounds(
    job_directory: Path, settings: FacilitySettings, round: int, received: Manifest | None = None
) -> list[Path]:
    """Remove this federation's models and this facility's updates of rounds before `round` beside `job_directory`.

    Directories of several models have the number of the final evaluation; those that are not the one `received` go.
    After an early end that number is larger than the round of the model that is evaluated, which stays: what counts is
    the round of the model received. Another facility may share that directory. Where facilities do not wait for one
    another it may be behind: so many rounds longer models stay. Returns what was removed.
    """
    if received is not None and received.kind == "model":
        round = min(round, received.round)

    def is_over(directory: Path) -> bool:
        if (manifest := manifest_if_any(directory)) is None:
            return False
        to_everybody = manifest.kind == "model" and manifest.facility is None
        if manifest.kind == MODELS and received is not None and manifest.federation == settings.federation:
            return manifest.content_sha256 != received.content_sha256
        mine = to_everybody or manifest.facility == settings.facility
        behind = settings.behind if manifest.kind == "model" else 0
        return mine and manifest.federation == settings.federation and manifest.round < round - behind

    return sweep_engine_directories(job_directory, is_over, known_by=NAME)


def note_job(job_directory: Path, settings: FacilitySettings, round: int) -> None:
    """Leave in a job's directory whose it is, so that a later job can remove it. Without room there is no note."""
    temporary = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    beside = temporary.resolve().parent == job_directory.resolve().parent
    values = {"federation": settings.federation, "facility": settings.facility, "round": round}
    with suppress(OSError):
        write_json(job_directory / NOTE, values | {"temporary": temporary.name if beside else ""})


def sweep_jobs(job_directory: Path, settings: FacilitySettings, round: int, received: Manifest) -> list[Path]:
    """Remove what jobs of this facility left beside `job_directory` whose round is `KEPT_JOBS` behind or more: what
    they printed, their progress, and what the trainer left in TMPDIR. Returns the jobs' directories.

    As in `remove_old_rounds`, the round is that of the model received where that is earlier.
    """
    round = min(round, received.round) if received.kind == "model" else round
    kept = max(KEPT_JOBS, settings.behind + 2)

    def beside(directory: Path) -> str | None:
        try:
            note = Fields(raw=read_json(directory / NOTE, most_bytes=4096), where=NOTE)
            whose = (note.words("federation", longest=100), note.words("facility", longest=100))
            ours = whose == (settings.federation, settings.facility) and note.whole("round") <= round - kept
            return note.words("temporary", "", longest=100) if ours else None
        except ManifestError:
            return None

    return sweep_job_directories(job_directory, beside, known_by=NOTE)


def forget_earlier(state: Path, round: int) -> list[Path]:
    """Remove optimizer states and residuals of rounds before `round`, whose update is kept; returns them."""
    earlier: list[Path] = []
    for kept in (by_round(state), by_round(state / "residual")):
        newest = max(kept, default=0)  # the final evaluation makes none: the one before stays, more rounds may follow
        earlier += [path for number, path in kept.items() if number < min(round, newest)]
    for path in earlier:
        shutil.rmtree(path, ignore_errors=True)
    return earlier
