"""What this facility has released of its data: a line for each noised step and validation figure, written before.

A line is on disk before its noise is used. A crash between the two counts a release that did not happen; a release that
happened is never left out. An attempt that is taken up again, or made once more, adds to the lines that are there.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from facility.exchange.errors import ConfigurationError, InputError, TransientError
from facility.exchange.files.durable import complete_lines, fsync_directory, write_all
from facility.exchange.files.locks import take_lock
from facility.exchange.messages.privacy import Unit
from facility.exchange.privacy.accounting import Releases
from facility.exchange.validation import parse_dataclass, validated

FOLDER, NAME = "privacy", "released.jsonl"
Kind = Literal["training", "validation"]


def ledger_path(state: Path) -> Path:
    """The ledger of releases in a facility's state directory."""
    return Path(state) / FOLDER / NAME


@validated(frozen=True, kw_only=True)
class Entry:
    """One release."""

    kind: Kind
    """Training and validation have units of their own, so their losses do not add up."""
    round: int
    unit: Unit
    noise_multiplier: float
    sampling_rate: float


@dataclass(kw_only=True)
class ReleaseLedger:
    """The releases of one facility in one federation, below its state directory."""

    state: Path

    def __post_init__(self) -> None:
        self._entries = self._read()
        self._file: int | None = None

    @property
    def path(self) -> Path:
        return ledger_path(self.state)

    def releases(self, kind: Kind) -> list[Releases]:
        """All of one kind; equal ones in a row together."""
        mine = ((one.noise_multiplier, one.sampling_rate) for one in self._entries if one.kind == kind)
        return [
            Releases(count=len(list(same)), noise_multiplier=noise, sampling_rate=rate)
            for (noise, rate), same in groupby(mine)
        ]

    def count(self, kind: Kind) -> int:
        return sum(one.kind == kind for one in self._entries)

    def check_unit(self, unit: Unit) -> None:
        """Raise `InputError` where earlier releases protect another unit, so that they do not add up to one bound."""
        if others := {one.unit for one in self._entries} - {unit}:
            raise InputError(
                f"{self.path} holds releases that protect a {others.pop()}, the settings ask for unit {unit}: one "
                "budget has one unit; set it back, or begin a federation of another name"
            )

    def open(self) -> None:
        """Take the ledger for this process alone. Raises `TransientError` where another process holds it, `OSError`."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if not take_lock(descriptor, self.path, wait=False):
                raise TransientError(f"{self.path} is held by another process that trains: wait for its end")
        except (TransientError, OSError):
            os.close(descriptor)
            raise
        self._file, self._entries = descriptor, self._read()
        whole = sum(map(len, complete_lines(self.path)))
        if whole < os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, whole)  # a crash cut the last line off, whose noise was never used
        fsync_directory(self.path.parent)
        fsync_directory(self.path.parent.parent)

    def record(self, entry: Entry) -> None:
        """Put one release on disk; the noise may be used afterwards."""
        assert self._file is not None, "the ledger is opened first"
        write_all(self._file, json.dumps(asdict(entry)).encode() + b"\n")
        os.fsync(self._file)
        self._entries.append(entry)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self) -> list[Entry]:
        known: dict[bytes, Entry] = {}  # the steps of a round have the same line
        found = []
        for number, line in enumerate(complete_lines(self.path), 1):
            try:
                if line not in known:
                    known[line] = parse_dataclass(Entry, json.loads(line))
                found.append(known[line])
            except (ValueError, ConfigurationError) as error:
                raise InputError(
                    f"{self.path}, line {number}, is damaged ({error}): how much of the privacy budget is spent is not "
                    "known, so nothing more is released; restore the file from a backup"
                ) from None
        return found
