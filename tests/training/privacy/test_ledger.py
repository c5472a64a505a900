"""Laws of the ledger: a release is on disk before it is used, is never forgotten, and a damaged ledger stops all."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest

from facility.exchange.errors import InputError, TransientError
from facility.exchange.privacy.accounting import Releases
from facility.rounds.privacy_ledger import Entry, ReleaseLedger


def entry(noise: float = 1.0, rate: float = 0.1, kind: str = "training", **changes: object) -> Entry:
    values = {"kind": kind, "round": 0, "unit": "document", "noise_multiplier": noise, "sampling_rate": rate} | changes
    return Entry(**values)  # type: ignore[arg-type]


def recorded(state: Path, *entries: Entry) -> ReleaseLedger:
    ledger = ReleaseLedger(state=state)
    ledger.open()
    for one in entries:
        ledger.record(one)
    ledger.close()
    again = ReleaseLedger(state=state)
    assert again.releases("training") == ledger.releases("training"), "a report counts what was released since"
    return again


def test_what_is_recorded_is_there_for_the_next_process(tmp_path: Path):
    recorded(tmp_path, entry(), entry(), entry(2.0, kind="validation", rate=1.0), entry())
    ledger = recorded(tmp_path, entry(1.5))
    assert ledger.releases("training") == [
        Releases(count=3, noise_multiplier=1.0, sampling_rate=0.1),
        Releases(count=1, noise_multiplier=1.5, sampling_rate=0.1),
    ]
    assert ledger.releases("validation") == [Releases(count=1, noise_multiplier=2.0)]
    assert (ledger.count("training"), ledger.count("validation")) == (4, 1)
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600


def test_a_line_is_synchronised_before_its_noise_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ledger = ReleaseLedger(state=tmp_path)
    ledger.open()
    seen: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append(len(ledger.path.read_bytes().splitlines())), real(fd))[1])
    for number in range(1, 4):
        ledger.record(entry())
        assert seen == list(range(1, number + 1))


def test_a_line_that_the_disk_takes_in_part_is_an_error_before_its_noise_is_used(tmp_path: Path):
    ledger = recorded(tmp_path, entry())
    ledger.open()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ledger.path.stat().st_size + 30, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            ledger.record(entry())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ledger.count("training") == 1
    ledger.close()
    assert recorded(tmp_path, entry()).count("training") == 2


def test_a_line_that_a_crash_cut_off_was_not_used(tmp_path: Path):
    ledger = recorded(tmp_path, entry(), entry())
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + whole[:30])
    assert ReleaseLedger(state=tmp_path).count("training") == 2
    assert recorded(tmp_path, entry()).count("training") == 3


def test_a_damaged_ledger_stops_every_release(tmp_path: Path):
    ledger = recorded(tmp_path, entry(), entry())
    ledger.path.write_bytes(b"x" + ledger.path.read_bytes())
    with pytest.raises(InputError, match="line 1, is damaged"):
        ReleaseLedger(state=tmp_path)


def test_two_processes_do_not_release_at_once(tmp_path: Path):
    first = ReleaseLedger(state=tmp_path)
    first.open()
    with pytest.raises(TransientError, match="held by another process"):
        ReleaseLedger(state=tmp_path).open()
    first.close()
    ReleaseLedger(state=tmp_path).open()


def test_releases_of_another_unit_do_not_add_up(tmp_path: Path):
    ledger = recorded(tmp_path, entry(unit="block"))
    ledger.check_unit("block")
    with pytest.raises(InputError, match="protect a block, the settings ask for unit document"):
        ledger.check_unit("document")
