"""The first step finds damage before a job is submitted, names the file and the way back, and going back works."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from coordinator.archive import audit
from coordinator.archive.rewind import rewind
from coordinator.archive.rounds import Archive
from coordinator.config.closing import ClosingSettings
from coordinator.config.settings import CoordinatorSettings, StopSettings
from coordinator.engine.run import going_on
from coordinator.rounds.late import LateJob, remember_job, remembered_job
from coordinator.steps import commit, telling
from coordinator.steps.start import start
from facility.exchange.errors import CheckpointError, CrossFedError
from facility.exchange.messages.manifest import read_manifest
from tests.aggregation.updates import write_update
from tests.pico import save_pico
from tests.steps.test_aggregate_step import close

SETTINGS = CoordinatorSettings(federation="f", rounds=3, facilities=["a"])


@pytest.fixture
def two_rounds(tmp_path: Path) -> Archive:
    archive = Archive(tmp_path / "archive")
    model, _, _ = start(archive, save_pico(tmp_path / "model", dtype="bfloat16"), SETTINGS)
    for number in range(2):
        update = write_update(tmp_path / f"a{number}", model, "a", move=0.02, round=number)
        model, _, _ = close(archive, model, [update], SETTINGS, number)
    return archive


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("part", ["model/*.safetensors", "state/master/*.safetensors", "state/velocity/*.safetensors"])
def test_one_damaged_bit_is_named_with_the_way_back(part: str, two_rounds: Archive, tmp_path: Path):
    files = sorted(two_rounds.round_directory(1).glob(part))
    if not files and "velocity" in part:
        files = sorted(two_rounds.round_directory(1).glob("state/*/*.safetensors"))[-1:]
    original = files[0].read_bytes()
    flip(files[0])
    with pytest.raises(CheckpointError, match=rf"{files[0].name}.*altered; restore.*crossfed rewind --to 1"):
        start(two_rounds, tmp_path / "model", SETTINGS)
    files[0].write_bytes(original)
    assert start(two_rounds, tmp_path / "model", SETTINGS)[1:] == (2, True), "restored: the same command goes on"
    flip(files[0])
    rewind(two_rounds, 1)
    assert start(two_rounds, tmp_path / "model", SETTINGS) == (two_rounds.model_for(1), 1, True)


def test_the_way_back_leads_to_a_round_whose_model_is_kept(two_rounds: Archive, tmp_path: Path):
    """The archive keeps the models of the last rounds, and the first one."""
    shutil.rmtree(two_rounds.model_for(1))
    flip(next(two_rounds.model_for(2).glob("*.safetensors")))
    with pytest.raises(CheckpointError, match="rewind --to 0` repeats rounds 0 to 1, .* asked for again"):
        start(two_rounds, tmp_path / "model", SETTINGS)
    rewind(two_rounds, 0)
    assert start(two_rounds, tmp_path / "model", SETTINGS) == (two_rounds.model_for(0), 0, True)


@pytest.mark.parametrize("rounds", [1, 2])
def test_fewer_rounds_than_are_done_train_none_and_keep_what_is_there(rounds: int, two_rounds: Archive, tmp_path: Path):
    """The newest model is evaluated where it was not; then nothing is left to do, and no round is repeated."""
    lowered = dataclasses.replace(SETTINGS, rounds=rounds, final_evaluation=True)
    newest = two_rounds.model_for(2)
    assert start(two_rounds, tmp_path / "model", lowered) == (newest, rounds, True)
    two_rounds.write_note("evaluation", {"after_round": 1})
    assert start(two_rounds, tmp_path / "model", lowered) == (newest, rounds, False)
    assert two_rounds.rounds() == [0, 1] and newest.is_dir()


@pytest.mark.parametrize(("key", "before", "now"), [("patience", 1, 0), ("divergence", 0.5, 2.0), ("patience", 1, 2)])
def test_a_federation_that_ended_early_goes_on_under_another_stop(
    key: str, before: float, now: float, two_rounds: Archive, tmp_path: Path
):
    """It was told as a change that decides when the federation ends, and then nothing was left to do."""

    def settings(value: float) -> CoordinatorSettings:
        described = {"federation": {f"stop.{key}": value}, "facilities": {"a": {}}}
        stop = StopSettings(**{key: value})
        return dataclasses.replace(SETTINGS, rounds=5, stop=stop, described=described, final_evaluation=False)

    start(two_rounds, tmp_path / "model", settings(before))
    for number, loss in enumerate((2.0, 3.0)):
        file = two_rounds.round_directory(number) / "round.json"
        entry = json.loads(file.read_text())
        entry["facilities"][0]["loss_received"] = loss
        file.write_text(json.dumps(entry | {"ended": number == 1, "global_loss": loss}))
    assert start(two_rounds, tmp_path / "model", settings(before))[2] is False
    assert start(two_rounds, tmp_path / "model", settings(before / 2 if key == "divergence" else before))[2] is False
    for _ in range(2):  # killed in its next round, it is asked for again
        assert start(two_rounds, tmp_path / "model", settings(now))[2] is True
    rewind(two_rounds, 1)
    assert two_rounds.read_note("reopened") == {}, "what is made again may end it again"


@pytest.mark.parametrize(
    ("rounds", "done", "said"),
    [
        (2, 0, ""),
        (2, 1, ", going on after round 0"),
        (5, 4, ", going on after round 3"),
        (4, 4, ", all 4 are done"),
        (1, 1, ", which is done"),
        (2, 4, ", all are done: 4 in all"),
    ],
)
def test_the_first_line_of_a_run_says_what_is_done(rounds: int, done: int, said: str):
    assert going_on(rounds, done) == said


HARMS = {
    "one bit": lambda data: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:],
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
}
DERIVED = ("history.jsonl", "audit.jsonl", "events.jsonl", "report.html")
"""Written anew, or read for nothing that a round depends on."""


@pytest.mark.parametrize("harm", HARMS)
def test_damage_at_any_file_of_the_archive_is_named_or_makes_no_difference(
    harm: str, two_rounds: Archive, tmp_path: Path
):
    """And with the file restored, the same call goes on. Older rounds' models, which nothing reads, may be damaged."""
    expected = start(two_rounds, tmp_path / "model", SETTINGS)
    files = sorted(path for path in two_rounds.path.rglob("*") if path.is_file())
    needed = [path for path in files if path.name not in DERIVED and "round-0000/model" not in str(path)]
    assert len(needed) >= 12 and {path.suffix for path in needed} >= {".json", ".safetensors"}
    for file in needed:
        original = file.read_bytes()
        if not original:
            continue
        file.write_bytes(HARMS[harm](original))
        try:
            found = start(two_rounds, tmp_path / "model", SETTINGS)
        except CrossFedError as error:
            assert file.name in str(error) and str(file.parent) in str(error), (file, error)
            assert "restore" in str(error), (file, error)
        else:
            assert found == expected and harm == "one bit" and file.suffix == ".json", file
        file.write_bytes(original)
        assert start(two_rounds, tmp_path / "model", SETTINGS) == expected, file


def test_a_first_round_that_was_interrupted_keeps_its_late_jobs_and_another_archive_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place = tmp_path / "work" / "step"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    model = save_pico(tmp_path / "model", dtype="bfloat16")
    settings = dataclasses.replace(SETTINGS, closing=ClosingSettings(quorum=1, late="carry"))
    start(Archive(tmp_path / "archive"), model, settings)
    late = LateJob(facility="a", round=0, directory="/there/job")
    remember_job(place.parent, late)
    start(Archive(tmp_path / "archive"), model, settings)
    assert remembered_job(place.parent, "a") == late, "killed before the first round was complete"
    start(Archive(tmp_path / "other"), model, settings)
    assert remembered_job(place.parent, "a") is None


def test_a_round_whose_coordinator_was_killed_once_it_was_there_is_told_at_the_next_start(
    two_rounds: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Audit log and trackers had never heard of it. A round that was not there yet is told when it is made again."""
    fed: list[int] = []
    monkeypatch.setattr(telling, "track_round", lambda archive, name, trackers, entry: fed.append(entry.round) or [])
    monkeypatch.setenv(audit.VARIABLE, str(tmp_path / "audit.jsonl"))
    model, number, _ = start(two_rounds, tmp_path / "model", SETTINGS)
    update = write_update(tmp_path / "a2", model, "a", round=number)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for place, complete in (
        ("keep_updates", [0, 1]),
        ("log_aggregated", [0, 1, 2]),
    ):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(commit, place, killed)
            close(two_rounds, model, [update], SETTINGS, number)
        assert two_rounds.rounds() == complete and fed == []
        start(two_rounds, tmp_path / "model", SETTINGS)
        assert fed == complete[2:]
    start(two_rounds, tmp_path / "model", SETTINGS)
    assert fed == [2], "once"
    told = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(one["what"], one["round"], one["model"]) for one in told] == [
        ("aggregated", 2, read_manifest(two_rounds.model_for(3)).content_sha256)
    ]
    assert told[0]["weights"] == {"a": 1.0}
