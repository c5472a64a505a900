"""What a facility has answered outlasts crashes, full disks and processes that are killed within a line."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from facility.exchange.errors import InputError
from facility.masking.ledger import AnswerLedger, Entry


def entry(number: int) -> Entry:
    return Entry(
        run="r", round=number, base_sha256=f"m{number}", generation=f"g{number}", request="q", survivors=["a", "b"]
    )


@contextmanager
def room_for(path: Path, more: int) -> Iterator[None]:
    """The file grows by so many bytes, and no further."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_fills_up_within_a_line_is_no_damage(tmp_path: Path):
    ledger = AnswerLedger(state=tmp_path)
    ledger.record(entry(0))
    with room_for(ledger.path, 30), pytest.raises(OSError, match="File too large"):
        ledger.record(entry(1))
    assert ledger.entries() == [entry(0)]
    ledger.record(entry(1))
    ledger.record(entry(2))
    assert ledger.entries() == [entry(0), entry(1), entry(2)]


def test_a_line_that_a_crash_cut_off_anywhere_was_not_answered(tmp_path: Path):
    ledger = AnswerLedger(state=tmp_path)
    ledger.record(entry(0))
    one = ledger.path.stat().st_size
    ledger.record(entry(1))
    whole = ledger.path.read_bytes()
    for length in (one + 1, one + 30, len(whole) - 1):
        ledger.path.write_bytes(whole[:length])
        assert ledger.entries() == [entry(0)]
        ledger.record(entry(2))
        assert ledger.entries() == [entry(0), entry(2)]


def test_a_line_that_was_altered_stops_every_answer(tmp_path: Path):
    ledger = AnswerLedger(state=tmp_path)
    ledger.record(entry(0))
    ledger.record(entry(1))
    ledger.path.write_bytes(b"x" + ledger.path.read_bytes())
    with pytest.raises(InputError, match="is damaged"):
        ledger.record(entry(2))


def test_nothing_is_answered_before_its_line_is_on_disk_whoever_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process that is killed after it wrote the line, and a device that refuses: the next one makes sure."""
    ledger, synced = AnswerLedger(state=tmp_path), os.fsync

    def refused(_: int) -> None:
        raise OSError(5, "Input/output error")

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        ledger.record(entry(0))
    for _ in range(2):
        monkeypatch.setattr(os, "fsync", refused)
        with pytest.raises(OSError, match="Input/output"):
            ledger.record(entry(0))
    monkeypatch.setattr(os, "fsync", synced)
    ledger.record(entry(0))
    assert ledger.entries() == [entry(0)]
