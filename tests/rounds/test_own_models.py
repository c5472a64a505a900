"""A facility's own models under masks: the last update is kept here, evaluated here, and what is missing says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from facility.exchange.messages.comparison import GLOBAL, MODELS, OWN, OwnModels, expected_of, missing_of, own_models_of
from facility.exchange.messages.manifest import Manifest, write_manifest
from facility.rounds.alone import OwnModel
from facility.rounds.kept import compared_place
from facility.rounds.own_models import gather_own_models, keep_own_update

NAME = "a"


def model(directory: Path, content: bytes = b"weights") -> Path:
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(content)
    write_manifest(directory, Manifest(kind="update", federation="f", round=0, facility=NAME))
    return directory


def sent(update: int | None, alone: int = 0) -> Manifest:
    wanted = {NAME: {"update": update, "alone": alone}}
    return Manifest(kind=MODELS, federation="f", round=3, extra={"models": [GLOBAL], OWN: wanted})


def test_the_last_update_is_kept_alone_and_its_files_are_shared(tmp_path: Path):
    state = tmp_path / "state"
    for number in (0, 1):
        model(tmp_path / f"finished-{number}", b"%d" % number)
    for number in (0, 1, 1):
        keep_own_update(state, tmp_path / f"finished-{number}", number)
    (kept,) = (state / "own_models").iterdir()
    assert kept.name == "update-1" and (kept / "model.safetensors").samefile(tmp_path / "finished-1/model.safetensors")


@pytest.mark.parametrize(
    ("wanted", "found", "reason"),
    [
        ((1, 2), {"update.a", "alone.a"}, {}),
        ((1, 0), {"update.a"}, {}),
        ((None, 2), {"alone.a"}, {}),
        ((None, 0), set(), {}),
        ((0, 2), {"alone.a"}, {"update.a": "the update of round 0, the last that counted"}),
        ((1, 3), {"update.a"}, {"alone.a": "trained rounds: 2"}),
    ],
)
def test_what_is_asked_for_is_evaluated_here_or_its_absence_has_a_reason(
    tmp_path: Path, wanted: tuple[int | None, int], found: set[str], reason: dict[str, str]
):
    state = tmp_path / "state"
    keep_own_update(state, model(tmp_path / "finished"), 1)
    model(OwnModel(state).model(2))
    missing = gather_own_models(state, sent(*wanted), NAME)
    assert {path.name for path in compared_place(state).iterdir()} == found
    assert missing.keys() == reason.keys() and all(reason[name] in missing[name] for name in reason)
    assert set(expected_of(sent(*wanted), NAME)) == {GLOBAL} | found | set(reason)


def test_a_damaged_update_is_not_evaluated_and_says_so(tmp_path: Path):
    state = tmp_path / "state"
    keep_own_update(state, model(tmp_path / "finished"), 1)
    (state / "own_models" / "update-1" / "model.safetensors").write_bytes(b"WEIGHTS")
    assert "another sha256" in gather_own_models(state, sent(1), NAME)["update.a"]
    assert not list(compared_place(state).iterdir())


def test_where_models_travel_nothing_is_gathered_and_what_was_is_gone(tmp_path: Path):
    state = tmp_path / "state"
    keep_own_update(state, model(tmp_path / "finished"), 1)
    gather_own_models(state, sent(1), NAME)
    plain = Manifest(kind=MODELS, federation="f", round=3, extra={"models": [GLOBAL]})
    assert gather_own_models(state, plain, NAME) == {} and not compared_place(state).exists()
    assert own_models_of(plain, NAME) is None and expected_of(plain, NAME) == [GLOBAL]


def test_a_facility_that_is_not_named_has_none():
    assert own_models_of(sent(1), "b") == OwnModels() and expected_of(sent(1), "b") == [GLOBAL]
    told = Manifest(kind="update", federation="f", round=3, extra={"comparison": {"figures": []}})
    assert missing_of(told, [GLOBAL]) == {}
