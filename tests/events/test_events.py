"""Events: written whole, to a private file, read back as they were; anything else is passed over."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from coordinator.archive.journal import KINDS as JOURNAL_KINDS
from coordinator.events.event import VARIABLE, Event, emit, failures_of, quote_for_display
from coordinator.events.follow import EventFile, read_event
from facility.exchange.errors import InputError
from facility.exchange.files.storage import SAME_COMMAND
from tests.conftest import ROOT


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EventFile:
    file = EventFile(tmp_path / "events.jsonl")
    monkeypatch.setenv(VARIABLE, str(file.path))
    return file


def test_the_file_is_its_owners_alone(events: EventFile):
    assert events.path.stat().st_mode & 0o777 == 0o600


def test_events_arrive_in_order_and_once(events: EventFile):
    emit("executing", step="/start")
    emit("submitted", step="/rounds/train_a", job="7")
    found = list(events.new())
    assert [(one.kind, dict(one.fields)) for one in found] == [
        ("executing", {"step": "/start"}),
        ("submitted", {"step": "/rounds/train_a", "job": "7"}),
    ]
    assert list(events.new()) == []


def test_an_event_that_a_full_disk_cut_costs_no_other(events: EventFile):
    with open(events.path, "a") as file:
        file.write('{"time": 3.0, "kind": "exec')
    emit("failed", step="aggregate", reason="the disk is full", futile=True)
    emit("received", facility="a", round=1)
    assert [one.kind for one in events.new()] == ["failed", "received"]


def test_writers_side_by_side_lose_nothing(events: EventFile):
    def write(name: str) -> None:
        for number in range(200):
            emit("received", facility=name, round=number)

    threads = [threading.Thread(target=write, args=(f"{n}" * 500,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(events.new())) == 800


def test_an_event_is_one_line_without_control_characters(events: EventFile):
    hostile = 'x"}\n{"kind": "host_key", "host": "login.other", "reason": ""}\n\x1b[2J\x07\u202e' + "y" * 10_000
    emit("refused", facility="a", round=0, reason=hostile)
    (one,) = events.new()
    assert one.kind == "refused" and len(one["reason"]) < 2100
    assert all(letter.isprintable() for letter in one["reason"])
    assert quote_for_display("a\r\nb\tc") == "a b c"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"text",
        b"[1]",
        b'"host_key"',
        b'{"kind": "nothing"}',
        b'{"kind": "host_key", "host": "x"}',
        b'{"kind": []}',
        b"\xff",
    ],
)
def test_what_is_no_event_is_passed_over(line: bytes):
    assert read_event(line) is None


def test_without_a_file_or_with_one_that_cannot_be_written_a_step_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(VARIABLE, raising=False)
    emit("executing", step="/start")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent"))
    emit("executing", step="/start")
    assert not (tmp_path / "absent").exists()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "link"))
    emit("executing", step="/start")
    assert (tmp_path / "target").read_text() == ""


@pytest.mark.parametrize(
    ("error", "futile", "reason"),
    [
        (InputError("damaged"), True, "damaged"),
        (
            OSError(30, "x", "/a"),
            True,
            "/a is mounted read-only: choose another directory, or have it mounted for writing",
        ),
        (OSError(5, "Input/output"), False, "[Errno 5] Input/output"),
    ],
)
def test_a_steps_failure_is_told_and_goes_on(events: EventFile, error: Exception, futile: bool, reason: str):
    with pytest.raises(type(error)), failures_of("start"):
        raise error
    (one,) = events.new()
    assert one["reason"].removesuffix(SAME_COMMAND) == reason
    assert one == Event(kind="failed", fields={"step": "start", "reason": one["reason"], "futile": futile})


def test_an_earlier_runs_file_is_not_read(tmp_path: Path):
    (tmp_path / "events.jsonl").write_text('{"kind": "executing", "step": "/start"}\n')
    assert list(EventFile(tmp_path / "events.jsonl").new()) == [] and os.listdir(tmp_path) == ["events.jsonl"]


def test_every_kind_of_entry_is_documented_with_the_same_words():
    text = (ROOT / "docs" / "reference" / "files.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text.split("The kinds:")[1], re.M))
    assert rows == dict(JOURNAL_KINDS)
