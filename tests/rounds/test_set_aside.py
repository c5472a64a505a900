"""After `crossfed rewind` no facility goes on from what it keeps of rounds that were set aside, whichever it misses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from coordinator.archive.rewind import rewind
from coordinator.archive.rounds import Archive
from coordinator.config.settings import CoordinatorSettings, SendingSettings
from coordinator.steps.aggregate import close_round
from coordinator.steps.arrived import CollectedRound, sort_out
from coordinator.steps.start import start
from facility.exchange.messages.manifest import Manifest, read_manifest, with_extra
from facility.exchange.messages.set_aside import KEY, set_aside
from facility.rounds.kept import by_round, latest_before
from facility.rounds.sealed import check_kept, write_seal
from facility.rounds.set_aside import forget_set_aside
from tests.aggregation.updates import write_update
from tests.pico import save_pico
from tests.rounds.test_round import Site, site  # noqa: F401 (a fixture)

SETTINGS = CoordinatorSettings(
    federation="f", rounds=9, facilities=["a"], keep_rounds=0, sending=SendingSettings(encoding="delta-int8")
)
PLACES = ("", "residual", "personal")


def keep(state: Path, number: int) -> None:
    """What a facility's round leaves to the next one."""
    for place in PLACES:
        directory = state / place / f"round-{number}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"%d" % number)
        write_seal(directory)
    (state / f"sync-{number}.0").mkdir(exist_ok=True)
    (state / "finished" / f"update-{number}" / "update").mkdir(parents=True, exist_ok=True)


def kept(state: Path) -> list[list[int]]:
    return [sorted(by_round(state / place)) for place in PLACES]


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "archive")
    start(archive, save_pico(tmp_path / "model", dtype="bfloat16"), SETTINGS)
    for number in range(3):
        close(archive, number)
    return archive


def close(archive: Archive, number: int) -> None:
    """Make a round of one update."""
    model, place = archive.model_for(number), archive.path.parent / f"update-{number}"
    shutil.rmtree(place, ignore_errors=True)
    arrived = sort_out([write_update(place, model, "a", round=number, move=0.01)])
    close_round(CollectedRound(archive=archive, settings=SETTINGS, model=model, number=number, arrived=arrived))


def received(archive: Archive, number: int) -> Manifest:
    return read_manifest(archive.model_for(number))


@pytest.mark.parametrize("missed", [0, 1, 2])
def test_a_facility_that_misses_repeated_rounds_begins_without_what_it_kept(
    archive: Archive, tmp_path: Path, missed: int
):
    state = tmp_path / "state"
    for number in (1, 2):
        assert not forget_set_aside(state, received(archive, number))
        keep(state, number)
    rewind(archive, 1)
    start(archive, tmp_path / "model", SETTINGS)
    for number in range(1, 1 + missed):
        close(archive, number)
    model = received(archive, 1 + missed)
    assert len(forget_set_aside(state, model)) == 10, "the newest two of each kind, and updates"
    assert not by_round(state / "finished", "update-"), "of a round that left nothing to continue from"
    assert kept(state) == [[], [], []] and not list(state.glob("sync-*"))
    assert not check_kept(state, 1 + missed), "and nothing is taken for damaged"
    keep(state, 1 + missed)
    assert not forget_set_aside(state, model), "what it has left since stays"
    close(archive, 1 + missed)
    assert not forget_set_aside(state, received(archive, 2 + missed))
    assert kept(state) == [[1 + missed]] * 3


def test_what_was_kept_of_rounds_before_stays(archive: Archive, tmp_path: Path):
    state = tmp_path / "state"
    keep(state, 1)
    keep(state, 2)
    rewind(archive, 2)
    start(archive, tmp_path / "model", SETTINGS)
    forget_set_aside(state, received(archive, 2))
    assert kept(state) == [[1]] * 3


def test_an_update_that_is_handed_over_again_keeps_what_its_round_left(archive: Archive, tmp_path: Path):
    """From the same model, settings and data a round that is repeated is not trained again."""
    state = tmp_path / "state"
    keep(state, 1)
    keep(state, 2)
    rewind(archive, 1)
    start(archive, tmp_path / "model", SETTINGS)
    forget_set_aside(state, received(archive, 1), done=1)
    assert kept(state) == [[1]] * 3 and sorted(by_round(state / "finished", "update-")) == [1]
    close(archive, 1)
    forget_set_aside(state, received(archive, 2))
    assert latest_before(state, 2) == state / "round-1"


def test_every_model_after_a_rewind_names_it_though_a_person_removes_the_folder(archive: Archive, tmp_path: Path):
    first = rewind(archive, 2)
    start(archive, tmp_path / "model", SETTINGS)
    assert set_aside(received(archive, 2)) == {first.name: 2}
    close(archive, 2)
    shutil.rmtree(first)
    second = rewind(archive, 2)
    start(archive, tmp_path / "model", SETTINGS)
    close(archive, 2)
    message = archive.message_for(3)
    assert message is not None and set_aside(read_manifest(message)) == set_aside(received(archive, 3))
    assert set_aside(received(archive, 3)) == {first.name: 2, second.name: 2}


@pytest.mark.parametrize(
    "said", [5, ["a"], {"a": "1"}, {"a": -1}, {"a": True}, {"x" * 101: 1}, {str(n): 1 for n in range(1001)}]
)
def test_what_makes_no_sense_removes_nothing(archive: Archive, tmp_path: Path, said: object):
    keep(tmp_path / "state", 1)
    with_extra(archive.model_for(2), KEY, said)
    assert not forget_set_aside(tmp_path / "state", received(archive, 2)) and kept(tmp_path / "state") == [[1]] * 3


def test_a_job_goes_on_from_nothing_that_was_set_aside(site: Site):  # noqa: F811
    """And where it is asked for again, what its own round left is there, and is not trained again."""
    state = site.root / "state" / "pico" / "north"
    for number in (2, 3):
        keep(state, number)
    model = site.send(round=4)
    with_extra(model, KEY, {"rewound-20260101-000000": 3})
    result, update = site.run(model, round=4)
    assert result.returncode == 0 and read_manifest(update).round == 4, result.stderr
    assert "of a round that crossfed rewind set aside" in result.stderr
    assert not any((state / place / "round-3").exists() for place in PLACES) and kept(state)[2] == [2]
    keep(state, 4)
    with_extra(model, KEY, {"rewound-20260101-000000": 3, "rewound-20260102-000000": 4})
    result, _ = site.run(model, round=4)
    assert "not trained again" in result.stderr and kept(state)[2] == [2, 4]
