"""Remove what the coordinator's working directory no longer needs once a round is in the archive.

The engine gives every step and transfer a directory and never removes one: without this, N updates and a model a round
stay for ever. What remains is bounded by the updates of the round under way and one model's links, whatever the number
of rounds.
"""

from __future__ import annotations

from pathlib import Path

from facility.exchange.files.sweep import sweep_engine_directories
from facility.exchange.messages.comparison import ALONE, MODELS
from facility.exchange.messages.manifest import NAME, manifest_if_any


def sweep_round(
    job_directory: Path, federation: str, round: int, *, behind: int = 0, but: Path | None = None
) -> list[Path]:
    """Remove updates of rounds up to `round`, which is complete, and models of rounds before it; returns them.

    `behind`: rounds that a facility at work may be behind; local ones read the coordinator's own copy of the model.

    Directories that a comparison sent are removed as well, `but` one, whose answers are in the archive.

    `job_directory` is the directory of a step that the engine runs at the coordinator: its neighbours are looked at.
    Call it only after the round is in the archive: a run that is killed in between reads models from there.
    """

    def is_over(directory: Path) -> bool:
        if (manifest := manifest_if_any(directory)) is None or manifest.federation != federation:
            return False
        if manifest.kind in (MODELS, ALONE):
            return but is not None and directory.resolve() != but.resolve()
        return manifest.round <= round if manifest.kind == "update" else manifest.round < round - behind

    return sweep_engine_directories(job_directory, is_over, known_by=NAME)
