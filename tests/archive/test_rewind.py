"""Going back a round: nothing is deleted, and `start` goes on from the model that the round started from."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.archive.rewind import rewind, stateless
from coordinator.archive.rounds import Archive
from coordinator.steps.start import start
from facility.exchange.errors import InputError, ManifestError
from tests.archive.test_archive import SETTINGS, close


@pytest.fixture
def archive(tmp_path: Path, pico_llama: Path) -> Archive:
    archive = Archive(tmp_path / "archive")
    start(archive, pico_llama, SETTINGS)
    for number in range(3):
        close(archive, number)
    archive.write_note("stopped", {"round": 2, "reason": "diverged"})
    return archive


@pytest.mark.parametrize("to", [0, 1, 2])
def test_the_same_command_goes_on_from_there(archive: Archive, pico_llama: Path, to: int):
    wanted = archive.model_for(to)
    aside = rewind(archive, to)
    assert sorted(path.name for path in aside.iterdir()) == [f"round-{n:04d}" for n in range(to, 3)]
    assert start(archive, pico_llama, SETTINGS) == (wanted, to, True)
    assert archive.read_note("stopped") == {}
    assert len((archive.path / "history.jsonl").read_text().splitlines()) == to


@pytest.mark.parametrize("to", [-1, 3, 7])
def test_a_round_that_was_never_made_is_refused(archive: Archive, to: int):
    with pytest.raises(InputError, match="holds rounds 0, 1, 2"):
        rewind(archive, to)
    assert archive.rounds() == [0, 1, 2]


def test_a_pruned_or_damaged_start_is_refused_and_nothing_moves(archive: Archive):
    archive.prune(2)
    with pytest.raises(InputError, match="pruned; rounds to go back to are 0, 2"):
        rewind(archive, 1)
    weights = next((archive.round_directory(1) / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ManifestError):
        rewind(archive, 2)
    assert archive.rounds() == [0, 1, 2]


def test_a_round_whose_state_was_pruned_begins_without_one_until_it_is_complete(archive: Archive):
    archive.prune(0)
    assert [archive.state_for(n) is not None and archive.state_for(n).is_dir() for n in (1, 2, 3)] == [
        False,
        False,
        True,
    ]
    assert not stateless(archive, 3) and stateless(archive, 2)
    rewind(archive, 2)
    assert archive.state_for(2) is None
    close(archive, 2)
    assert archive.state_for(3).is_dir() and archive.read_note("rewound") == {}
