"""Whether what the next round begins with lies in the archive as it was written. Reads every byte of it."""

from __future__ import annotations

from coordinator.archive.rewind import MOVING
from coordinator.archive.rounds import REWOUND, Archive
from coordinator.config.federation import Federation
from coordinator.preflight.row import ME, Row, fail, ok
from coordinator.steps.start import way_back
from facility.exchange.errors import InputError, ManifestError
from facility.exchange.messages.manifest import verify_manifest

CHECK = "archive"


def check_archive(federation: Federation) -> list[Row]:
    """One row on the initial model, the newest one and its state; none where no round was ever begun, and none on a
    rewind that `crossfed run` completes first."""
    archive = Archive(federation.archive_path)
    if not (archive.path / "initial").exists():
        return []
    try:
        if archive.read_note(REWOUND).get(MOVING):
            return []
        while True:
            following = len(archive.history())
            row = _check_models(federation, archive, following)
            if row.verdict == "ok" or len(archive.rounds()) == following:
                return [row]
            # else a run that is under way has completed a round, and may have removed what was being read
    except InputError as error:
        return [fail(ME, CHECK, str(error), "correct what is named; `crossfed run` goes on from this archive")]


def _check_models(federation: Federation, archive: Archive, following: int) -> Row:
    """`following`: the round that the next run begins with."""
    initial = archive.model_for(0)
    try:
        owner = verify_manifest(initial).federation
    except ManifestError as error:
        copied = f"{federation.path(federation.model)} was copied there"
        return fail(ME, CHECK, error.found, f"restore that file from a copy: {copied}")
    if owner != federation.name:
        return fail(ME, CHECK, f"{archive.path} belongs to federation {owner!r}", "choose another `archive:`")
    state = archive.state_for(following)
    if state is not None and not state.is_dir() and following < federation.rounds:
        return fail(ME, CHECK, f"{state} is missing", way_back(archive, following))
    try:
        verify_manifest(archive.model_for(following))
        if state is not None and state.is_dir():
            verify_manifest(state)
    except ManifestError as error:
        return fail(ME, CHECK, error.found, way_back(archive, following))
    return ok(ME, CHECK, f"complete rounds: {following}; the next begins with what was written, digest by digest")
