"""A finished update stays at its facility for a while, so that a round asked for twice is trained once.

When the coordinator dies while a job runs, the job ends, and its update is not fetched. The same round, asked for
again with the same model, settings and data, finds it here. The directory shares its files with the job's own (hard
links), so it takes no room of its own while that one is there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from facility.exchange.errors import ManifestError
from facility.exchange.files import present
from facility.exchange.files.durable import write_json
from facility.exchange.files.links import link_tree
from facility.exchange.files.locks import take_lock
from facility.exchange.hints import field_default
from facility.exchange.json_values import values_in
from facility.exchange.messages.manifest import sha256_of, verify_manifest
from facility.exchange.messages.progress import JobProgress, write_progress
from facility.exchange.messages.settings import read_facility_settings
from facility.rounds.kept import UPDATE, by_round

log = logging.getLogger(__name__)
KEY = "key.json"
MOST_KEPT = 4
"""Finished updates that are kept, those of later rounds than the one asked for included: a coordinator could ask for
rounds from the last to the first."""

LOCKS = 16
"""Files that rounds take in turn for their locks, for they stay. No facility is at work at two rounds so far apart."""


class Finished:
    """The finished updates of one facility in one federation."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory) / "finished"

    def find(self, key: str, round: int) -> Path | None:
        """A whole update made for `key`, or None; one that is damaged is removed."""
        place = self.directory / f"{UPDATE}{round}"
        try:
            if values_in(place / KEY)["key"] != key:
                return None
            verify_manifest(place / "update")
        except (OSError, ValueError, KeyError, TypeError, ManifestError):
            shutil.rmtree(place, ignore_errors=True)
            return None
        return place / "update"

    def keep(self, key: str, round: int, update: Path) -> None:
        """Keep `update`, and remove those of earlier rounds and all but the newest of later ones."""
        place = self.directory / f"{UPDATE}{round}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        link_tree(update, self.place(round))
        write_json(place / KEY, {"key": key, "round": round})
        self.drop_before(round)
        others = {path: number for number, path in by_round(self.directory, UPDATE).items() if number != round}
        for path in sorted(others, key=lambda path: (path.stat().st_mtime, -others[path]))[: 1 - MOST_KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def drop_before(self, round: int) -> None:
        """Remove the updates of earlier rounds."""
        for number, other in by_round(self.directory, UPDATE).items():
            if number < round and (other / KEY).is_file():
                shutil.rmtree(other, ignore_errors=True)

    def of_rounds_from(self, round: int) -> list[Path]:
        """Directories of the updates of this round and later ones."""
        return [path for number, path in sorted(by_round(self.directory, UPDATE).items()) if number >= round]

    def place(self, round: int) -> Path:
        """Path of a round's finished update."""
        return self.directory / f"{UPDATE}{round}" / "update"

    @contextmanager
    def alone(self, round: int) -> Iterator[bool]:
        """Hold the round's lock while it is trained; a second job of the same round waits here for the first, and says
        so in the working directory's `progress.json`: a run that was killed leaves the jobs of this machine at work.

        Yields False where the file system has no locks: then nothing keeps two jobs apart.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self.directory / f"round-{round % LOCKS}.lock", "a", encoding="utf-8") as file:
            try:
                if not (held := take_lock(file, self.directory, wait=False)):
                    log.info("an earlier job of round %d is at work here: its end is waited for", round)
                    write_progress(Path.cwd(), JobProgress(stage="waiting", time=time.time()))
                    held = take_lock(file, self.directory)
            except OSError:
                held = False
            yield held


def key_of(base_sha256: str, settings: Path, dataset: Path) -> str:
    """What an update depends on: the model it starts from, the settings, the data.

    Of the settings what is not the default counts: after an update of CrossFed the same settings are written with keys
    that the one before did not know.
    """
    from facility.dataset import NAME

    manifest = dataset / NAME
    given = json.dumps(_given(read_facility_settings(settings)), sort_keys=True)
    digest = hashlib.sha256(given.encode()).hexdigest()
    parts = [base_sha256, digest, sha256_of(manifest) if present.is_file(manifest) else "-"]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _given(value: Any) -> Any:
    """The value as plain data; of a dataclass the fields that are not at their default."""
    if not dataclasses.is_dataclass(value):
        return value
    found = {}
    for field in dataclasses.fields(value):
        one = getattr(value, field.name)
        if one != field_default(field):
            found[field.name] = _given(one)
    return found
