"""What a facility no longer needs, so that its disk holds two models, one update and one optimizer state at most.

The model of round r exists only after every update of round r - 1 was averaged or given up: at the start of round r
no earlier update is of use. Once round r is finished and kept, no earlier optimizer state or residual is: the same
round asked for again is answered with the kept update.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from facility.exchange.files.sweep import sweep_engine_directories
from facility.exchange.messages.comparison import MODELS
from facility.exchange.messages.manifest import NAME, Manifest, manifest_if_any
from facility.exchange.messages.settings import FacilitySettings
from facility.rounds.kept import by_round


def sweep(job_directory: Path, settings: FacilitySettings, round: int, received: Manifest | None = None) -> list[Path]:
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


def forget_earlier(state: Path, round: int) -> list[Path]:
    """Remove optimizer states and residuals of rounds before `round`, whose update is kept; returns them."""
    earlier: list[Path] = []
    for kept in (by_round(state), by_round(state / "residual")):
        newest = max(kept, default=0)  # the final evaluation makes none: the one before stays, more rounds may follow
        earlier += [path for number, path in kept.items() if number < min(round, newest)]
    for path in earlier:
        shutil.rmtree(path, ignore_errors=True)
    return earlier
