"""Verifies that a round's dataset is the prepared one: cheaply in every round, in full after its files have changed.

Sizes, times and inodes of the files are compared with those of the last whole verification, which is recorded in the
facility's state. Where they differ, every file is read and compared with the digests in `dataset.json`.
"""

from __future__ import annotations

from pathlib import Path

from facility.dataset import NAME, PreparedDataset, open_dataset
from facility.exchange.files.durable import write_json
from facility.exchange.json_values import note_in

RECORD = "verified-dataset.json"


def check_dataset(dataset: Path, state: Path) -> bool:
    """True if the files were read. Raises `DatasetError` naming the file that is missing or was altered."""
    prepared = open_dataset(dataset)
    found = {"directory": str(dataset.resolve()), "files": _figures(prepared)}
    if note_in(state / RECORD) == found:
        return False
    prepared.verify()
    write_json(state / RECORD, found)
    return True


def _figures(prepared: PreparedDataset) -> dict[str, list[int]]:
    """Size, time in nanoseconds and inode of every file that training reads."""
    names = [NAME, *(file for split in prepared.manifest.splits for file in prepared.files(split))]
    status = {name: (prepared.directory / name).stat() for name in names}
    return {name: [one.st_size, one.st_mtime_ns, one.st_ino] for name, one in status.items()}
