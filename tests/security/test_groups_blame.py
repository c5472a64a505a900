"""The attacks on a round, on facilities' chains: what one leaves is its own failure, and the others' group goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.asynchronous.buffer import Meeting
from tests.asynchronous.test_buffer import begun, update

ATTACKS: dict[str, Callable[[Path], object]] = {
    "weights cut off": lambda place: next(place.glob("*.safetensors")).write_bytes(b"\x00" * 7),
    "no manifest": lambda place: (place / "manifest.json").unlink(),
    "a manifest of nothing": lambda place: (place / "manifest.json").write_text("{}"),
    "a manifest nested deep": lambda place: (place / "manifest.json").write_text("[" * 100_000),
    "no report": lambda place: (place / "report.json").unlink(),
    "numbers that are none": lambda place: (place / "report.json").write_text('{"tokens": 1e400}'),
    "a failure that is none": lambda place: (place / "failure.json").write_text('{"again": [[]]}'),
    "lone surrogates": lambda place: (place / "failure.json").write_bytes(b'{"reason": "\\udc00"}'),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_one_facility_leaves_is_its_own_failure(tmp_path: Path, attack: str):
    meeting: Meeting = begun(tmp_path, "abc", rounds=1)
    hostile = update(tmp_path, "b", 0)
    ATTACKS[attack](hostile)
    meeting.arrive("a", 0, update(tmp_path, "a", 0))
    meeting.arrive("b", 0, hostile)
    meeting.arrive("c", 0, update(tmp_path, "c", 0))
    driver = meeting.driver()
    assert {failure["facility"] for failure in driver.failures} == {"b"}, driver.failures
    assert all(failure["reason"].isprintable() for failure in driver.failures)
    assert set(meeting.lost(driver)) == {"b"} and not meeting.archive.read_note("stopped")
    assert {name for group in driver.groups for name in group["weights"]} == {"a", "c"}
