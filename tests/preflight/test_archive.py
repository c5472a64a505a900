"""What the next round begins with is read byte by byte by `crossfed check`, which passed over an altered model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from coordinator.archive.rewind import MOVING
from coordinator.archive.rounds import REWOUND, Archive
from coordinator.config.federation import Federation, read_federation
from coordinator.preflight.archive import check_archive
from coordinator.preflight.check import check
from coordinator.steps.start import start
from tests.archive.test_archive import SETTINGS, close
from tests.federations import write_federation
from tests.forked_trainers import variables


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """After two of three rounds."""
    found = read_federation(write_federation(tmp_path, ["a", "b"], name=SETTINGS.federation, rounds=3))
    archive = Archive(found.archive_path)
    start(archive, found.path(found.model), SETTINGS)
    for number in range(2):
        close(archive, number)
    return found


def turn_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_an_archive_as_it_was_written_passes_and_one_that_is_not_there_has_no_row(federation: Federation):
    (row,) = check_archive(federation)
    assert row.verdict == "ok" and "complete rounds: 2" in row.found
    shutil.rmtree(federation.archive_path)
    assert check_archive(federation) == []


@pytest.mark.parametrize(
    ("place", "found", "fix"),
    [
        (
            "initial/model/model.safetensors",
            "another sha256",
            "restore that file from a copy: .*model was copied there",
        ),
        ("round-0001/model/model.safetensors", "another sha256", "crossfed rewind --to 1"),
        ("round-0001/state", "state is missing", "crossfed rewind --to 1"),
        ("round-0001/round.json", "round.json", "rewind --to 1"),
        ("round-0000", "without gaps", ""),
    ],
)
def test_what_was_altered_or_removed_is_named_with_a_way_back(federation: Federation, place: str, found: str, fix: str):
    path = federation.archive_path / place
    if path.suffix == ".safetensors":
        turn_a_bit(path)
    elif path.suffix:
        path.write_text("{")
    else:
        shutil.rmtree(path)
    (row,) = check_archive(federation)
    assert row.verdict == "fail" and found in row.found
    said = f"{row.found} {row.fix}"
    assert re.search(fix, said) and "send" not in said, "nobody sends what is kept here"


def test_the_whole_check_has_the_row(federation: Federation, monkeypatch: pytest.MonkeyPatch):
    for name, value in variables().items():
        monkeypatch.setenv(name, value)
    turn_a_bit(federation.archive_path / "round-0001" / "model" / "model.safetensors")
    rows = check(federation.file, link=False)
    assert [row.verdict for row in rows if row.check == "archive"] == ["fail"]


def test_a_rewind_that_a_run_completes_first_is_not_judged(federation: Federation):
    archive = Archive(federation.archive_path)
    archive.write_note(REWOUND, {"round": 1, "aside": "rewound-x", MOVING: True})
    assert check_archive(federation) == []


def test_a_round_that_a_run_completes_meanwhile_is_no_fault(federation: Federation, monkeypatch: pytest.MonkeyPatch):
    """The run's pruning removes the model that was being read."""
    archive, model_for = Archive(federation.archive_path), Archive.model_for

    def completed(self: Archive, number: int) -> Path:
        if number == 2 and self.rounds() == [0, 1]:
            close(archive, 2)
            shutil.rmtree(model_for(self, 2))
        return model_for(self, number)

    monkeypatch.setattr(Archive, "model_for", completed)
    (row,) = check_archive(federation)
    assert row.verdict == "ok" and "complete rounds: 3" in row.found
