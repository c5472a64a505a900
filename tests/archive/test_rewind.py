"""Going back a round: nothing is deleted, and `start` goes on from the model that the round started from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from coordinator.archive.rewind import rewind, stateless
from coordinator.archive.rounds import CHANGES, COMPARED, Archive
from coordinator.rounds.acceptance import told
from coordinator.rounds.late import discount, discounted
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


def test_the_round_that_is_made_again_tells_the_changes_that_it_is_under(archive: Archive, pico_llama: Path):
    """The settings stay as they are; only the file of a round that is set aside said that they differ from those of
    the rounds before it."""
    close(archive, 3, changes=["aggregation.rule: mean -> trimmed_mean"])
    close(archive, 4, changes=["training.learning_rate: 0.1 -> 0.01"])
    archive.write_note(CHANGES, {"round": 5, "told": ["seed: 1 -> 2"]})
    (archive.round_directory(4) / "round.json").write_text("{damaged")
    rewind(archive, 4)
    assert told(archive) == ["seed: 1 -> 2"], "what a damaged file told is lost, and keeps nobody from going back"
    rewind(archive, 2)
    assert told(archive) == ["aggregation.rule: mean -> trimmed_mean", "seed: 1 -> 2"]
    start(archive, pico_llama, SETTINGS)
    assert told(archive) == ["aggregation.rule: mean -> trimmed_mean", "seed: 1 -> 2"]
    rewind(archive, 0)
    assert told(archive) == [], "no model was made under others"


def test_updates_of_rounds_set_aside_are_no_longer_compared(archive: Archive):
    for name in ("a", "b"):
        (archive.path / COMPARED / f"update.{name}").mkdir(parents=True)
    aside = rewind(archive, 2)
    assert [path.name for path in (archive.path / COMPARED).iterdir()] == ["update.b"], "of a round before"
    assert (aside / COMPARED / "update.a").is_dir()


def test_facilities_that_were_refused_in_a_round_set_aside_count_in_its_quorum_again(
    archive: Archive, pico_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "work" / "step").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work" / "step")
    archive.write_note("attempts", {"round": 3, "count": 1})
    discount(tmp_path / "work", 3, ["a"])
    start(archive, pico_llama, dataclasses.replace(SETTINGS, rounds=5))
    assert discounted(tmp_path / "work", 3) == {"a"}, "the attempt under way"
    close(archive, 3)
    rewind(archive, 3)
    start(archive, pico_llama, dataclasses.replace(SETTINGS, rounds=5))
    assert discounted(tmp_path / "work", 3) == set()
