"""What a run has written so far, so that the same command goes on after a crash.

The arrays of a data set grow in `.NAME.part` beside it; every `SAVE_SECONDS` they are forced to disk and `state.json`
says how far they came. The next run of the same request reads the sources from their beginning again, which costs
little, and encodes only what is not written yet. A request that differs, or sources that changed, start
again from nothing.

One process at a time writes there: it holds the lock of `.NAME.part.lock`, which is a file, since NFS locks no folder,
and beside it, since NFS keeps a folder in which a file is open. Where nothing can be locked the process that began last
has made that file anew; the one before finds another file in its place, and ends without touching what is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
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
"""Time between two saved states."""
STATE = "state.json"


class Part:
    """The folder of a run, and what an earlier one left there."""

    def __init__(self, directory: Path, request: str, turn: Turn) -> None:
        self.directory, self.request, self.turn = directory, request, turn
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
        self.turn.check()
        state = {split: writer.state() for split, writer in writers.items()}
        lengths = {split: sorted(counts.items()) for split, counts in self.lengths.items()}
        found = {"request": self.request, "batches": batches, "writers": state, "lengths": lengths}
        write_json(self.directory / STATE, found)
        self._saved = time.monotonic()

    def deliver(self, directory: Path) -> None:
        """Move the arrays to the data set's directory; from then on there is nothing to go on from. Raises
        `DatasetError` where another process has made arrays in their place."""
        self.turn.check()
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
    turn = Turn(directory)
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            yield Part(directory, request, turn)
        except TransientError:
            raise  # the same command goes on from here
        except Exception as error:
            turn.check(error)
            shutil.rmtree(directory, ignore_errors=True)
            turn.end()
            with suppress(OSError):  # another dataset is in one of them
                for folder in made:
                    folder.rmdir()
            raise
        if turn.holds():
            shutil.rmtree(directory, ignore_errors=True)
            turn.end()
    finally:
        turn.close()


def clear_after(out: Path, replaced: Path) -> None:
    """Remove what a run left that was killed once `out` was in its place: its folder, and `replaced`, the data set
    before. Nothing where another process is at work, or nothing can be locked."""
    out = Path(os.path.realpath(out))
    directory = out.with_name(f".{out.name}.part")
    with suppress(DatasetError, OSError):  # no file to lock: nothing is left
        turn = Turn(directory, anew=False)
        try:
            for left in (directory, replaced):
                if not not_ours(left):
                    shutil.rmtree(left, ignore_errors=True)
            turn.end()
        finally:
            turn.close()


class Turn:
    """This process's turn to write in a folder, from its making to `close`."""

    def __init__(self, directory: Path, *, anew: bool = True) -> None:
        """Not `anew`: the file is there, and can be locked, or raises `OSError`. Raises `DatasetError` where another
        process has the turn, or another account made the folder."""
        self.directory, self.path = directory, directory.with_name(f"{directory.name}.lock")
        for place in (directory, self.path):
            if reason := not_ours(place):
                raise DatasetError(
                    f"{reason}, and what is prepared would grow there: remove it, or choose another --out"
                )
        self._file = self._locked(anew)

    def _locked(self, anew: bool) -> int:
        """The descriptor of the file whose lock this process holds, or which it made where there are no locks."""
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # another process's error removes folders that it made
            how = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if anew else 0)
            file = os.open(self.path, how, 0o600)
            try:
                if not take_lock(file, self.path, wait=False):
                    raise DatasetError(f"{self.directory} is written by another process: wait for it, or end it")
            except OSError:  # no locks
                os.close(file)
                if not anew:
                    raise
                return self._made_anew()
            except BaseException:
                os.close(file)
                raise
            if self.holds(file):
                return file
            os.close(file)  # removed by another process, which ended before the lock was held

    def _made_anew(self) -> int:
        file, name = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.name}.")
        os.replace(name, self.path)
        return file

    def holds(self, file: int | None = None) -> bool:
        """Whether the file, by default that of this process, is still the one in its place."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file if file is None else file), os.stat(self.path))
        return False

    def check(self, error: Exception | None = None) -> None:
        """Raise `DatasetError` where another process has begun meanwhile. `error`: what may have come of that."""
        if not self.holds():
            raise DatasetError(
                f"another process began to write {self.directory}, where nothing can be locked: this one ends, and "
                "that one goes on from what is written"
            ) from error

    def end(self) -> None:
        """Nothing is left to go on from, and no file that says whose turn it is."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._file)
