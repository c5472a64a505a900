"""What a run has written so far, so that the same command goes on after a crash.

The arrays of a data set grow in `.NAME.part` beside it; every `SAVE_SECONDS` they are forced to disk and `state.json`
says how far they came. The next run of the same request reads the sources from their beginning again, which costs
little, and encodes only what is not written yet. A request that differs, or sources that changed, start
again from nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from facility.dataset import SPLITS, DatasetError
from facility.exchange.errors import TransientError
from facility.exchange.files.durable import write_json
from facility.exchange.files.locks import take_lock
from facility.exchange.files.owners import not_ours
from facility.exchange.json_values import values_in

SAVE_SECONDS = 20.0
"""Between two states."""
STATE = "state.json"


class Part:
    """The folder of a run, and what an earlier one left there."""

    def __init__(self, directory: Path, request: str) -> None:
        self.directory, self.request = directory, request
        self.batches = 0
        """Batches that are written."""
        self.writers: dict[str, dict[str, Any] | None] = dict.fromkeys(SPLITS, None)
        """State of each split's writer; None: it begins."""
        self.lengths: dict[str, Counter[int]] = {split: Counter() for split in SPLITS}
        """Number of documents by number of tokens."""
        self._saved = time.monotonic()
        self._load()

    def _load(self) -> None:
        try:
            found = values_in(self.directory / STATE)
            if found["request"] != self.request:
                raise ValueError("another request")
            self.batches, self.writers = found["batches"], found["writers"]
            for split, counts in found["lengths"].items():
                self.lengths[split] = Counter({int(length): count for length, count in counts})
        except (OSError, ValueError, KeyError, TypeError):
            for path in self.directory.iterdir():
                path.unlink()

    def save(self, writers: Mapping[str, Any], batches: int) -> None:
        """Remember what is written, if it is time. `batches`: how many are."""
        if time.monotonic() - self._saved < SAVE_SECONDS:
            return
        if not all(hasattr(writer, "state") for writer in writers.values()):
            return  # labelled rows and pairs of answers: small data, which begins anew
        state = {split: writer.state() for split, writer in writers.items()}
        lengths = {split: sorted(counts.items()) for split, counts in self.lengths.items()}
        found = {"request": self.request, "batches": batches, "writers": state, "lengths": lengths}
        write_json(self.directory / STATE, found)
        self._saved = time.monotonic()

    def deliver(self, directory: Path) -> None:
        """Move the arrays to the data set's directory; from then on there is nothing to go on from."""
        (self.directory / STATE).unlink(missing_ok=True)
        for path in sorted(self.directory.glob("*.npy")):
            os.rename(path, directory / path.name)


@contextmanager
def part_of(out: Path, wanted: Mapping[str, Any], *, known: bool) -> Iterator[Part]:
    """The folder in which `out` grows. An error removes it, a signal or `TransientError` leaves it.

    `known`: the sources have digests.
    Raises `DatasetError` where another process writes there, or another account made it.
    """
    out = Path(os.path.realpath(out))  # beside the directory itself, where `out` is a link to one
    directory = out.with_name(f".{out.name}.part")
    words = json.dumps(wanted, sort_keys=True, default=vars)
    request = hashlib.sha256(words.encode()).hexdigest() if known else f"not known {time.time_ns()}"
    made = [folder for folder in directory.parents if not folder.exists()]
    lock = _locked(directory)
    try:
        try:
            yield Part(directory, request)
        except TransientError:
            raise  # the same command goes on from here
        except Exception:
            shutil.rmtree(directory, ignore_errors=True)
            with suppress(OSError):  # another dataset is in one of them
                for folder in made:
                    folder.rmdir()
            raise
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)


def _locked(directory: Path) -> int:
    """The descriptor of the folder, made where it is missing, whose lock this process holds. Raises `DatasetError`."""
    while True:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # another process has just ended
        try:
            if reason := not_ours(directory):
                raise DatasetError(
                    f"{reason}, and what is prepared would grow there: remove it, or choose another --out"
                )
            with suppress(OSError):  # a file system without locks: then nothing keeps two of them apart
                if not take_lock(lock, directory, wait=False):
                    raise DatasetError(f"{directory} is written by another process: wait for it, or end it")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(directory)):
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # removed by another process, which ended before the lock was held
