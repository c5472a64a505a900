"""The mean of the last rounds' models, where the facilities' validation data chose it as the final model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.archive.rounds import Archive
from facility.exchange.messages.manifest import read_manifest

FOLDER = "averaged"
MEAN = "mean of the last models"
"""What the report's artefacts call it."""
MEAN_OF = "mean_of_rounds"
"""In the `extra` of its manifest: the rounds whose models it is the mean of."""


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """The final model."""

    model: Path
    rounds: list[int]
    """Whose models it is the mean of."""
    sha256: str


def read_averaged(archive: Archive) -> Averaged | None:
    """None where the final model is the global model of a round. Another round makes the choice void."""
    if not archive.path.is_dir():
        return None
    note, model = archive.read_note("comparison"), archive.path / FOLDER / "model"
    if not note.get("chosen") or not note.get("over") or note.get("after_round") != len(archive.rounds()) - 1:
        return None
    if not model.is_dir():
        return None
    manifest = read_manifest(model)
    return Averaged(model=model, rounds=list(manifest.extra.get(MEAN_OF, [])), sha256=manifest.content_sha256)
