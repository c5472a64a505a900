"""Remove this federation's old models and updates from the directory where the engine puts them.

StreamFlow gives every job and every transfer a directory of its own, named by a UUID, and never removes one. Ours are
known by the manifest inside; nothing else is touched: no directory without a manifest of this federation, none of a
round that is not older than the previous one, none that belongs to another user, no symbolic link, nothing that lies
elsewhere or deeper.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from facility.exchange.errors import ManifestError
from facility.exchange.messages.manifest import NAME, read_manifest
from facility.exchange.messages.settings import FacilitySettings


def sweep(job_directory: Path, settings: FacilitySettings, round: int) -> list[Path]:
    """Remove models and updates of rounds before `round` - 1 that lie beside `job_directory`; returns them.

    Does nothing when `job_directory` is not named by a UUID: then no engine made it, and its neighbours are not ours.
    """
    job_directory = Path(job_directory).resolve()
    if not _is_uuid(job_directory.name):
        return []
    removed = []
    for parent in _directories(job_directory.parent):
        if not _is_uuid(parent.name) or parent == job_directory:
            continue
        for candidate in _directories(parent):
            if _old(candidate, settings, round):
                shutil.rmtree(candidate, ignore_errors=True)
                removed.append(candidate)
        if removed and removed[-1].parent == parent:
            try:
                parent.rmdir()
            except OSError:
                pass
    return removed


def _old(directory: Path, settings: FacilitySettings, round: int) -> bool:
    if not (directory / NAME).is_file() or (directory / NAME).is_symlink():
        return False
    try:
        manifest = read_manifest(directory)
    except ManifestError:
        return False
    everybody = manifest.kind == "model" and manifest.facility is None
    mine = everybody or manifest.facility == settings.facility
    return mine and manifest.federation == settings.federation and manifest.round < round - 1


def _directories(parent: Path) -> list[Path]:
    """Real directories of this user below `parent`."""
    try:
        entries = list(os.scandir(parent))
    except OSError:
        return []
    return [
        Path(entry.path)
        for entry in sorted(entries, key=lambda e: e.name)
        if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    ]


def _is_uuid(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name.lower()
    except ValueError:
        return False
