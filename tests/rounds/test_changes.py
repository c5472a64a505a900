"""What has changed in federation.yml while a federation lives: nothing is passed over, and what matters is accepted."""

from __future__ import annotations

import copy
import re
import secrets
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from coordinator.archive.remarks import summary_remarks
from coordinator.archive.rewind import rewind
from coordinator.archive.rounds import Archive
from coordinator.archive.summary import summary
from coordinator.config.closing import EvenSettings
from coordinator.config.described import describe_federation, digest_of
from coordinator.config.federation import read_federation
from coordinator.config.settings import CoordinatorSettings, read_coordinator_settings
from coordinator.engine.render import write_rendered
from coordinator.rounds import acceptance
from coordinator.rounds.acceptance import NOTE, changes_since, take_over
from coordinator.rounds.changes import Change, changes_of
from coordinator.rounds.late import LateJob, remember_job, remembered_job
from coordinator.steps import commit
from coordinator.steps.start import start
from facility.exchange.errors import InputError
from facility.exchange.files.paths import CHECKOUT
from facility.exchange.messages.trainer import TrainerSettings
from tests.aggregation.updates import write_update
from tests.federations import write_federation
from tests.pico import save_pico
from tests.steps.test_aggregate_step import close

BEFORE: dict[str, Any] = {
    "federation": {"rounds": 10, "seed": 3, "aggregation.rule": "mean", "stop.patience": 0},
    "facilities": {
        name: {"dataset": "/d", "deployment.type": "slurm", "training.steps": 100, "training.schedule": "cosine"}
        for name in ("a", "b", "c.1")
    },
}


def changed(**values: Any) -> list[Change]:
    """Changes of the federation's own keys, `a__b` for `a.b`; `training__x` at all facilities."""
    now = copy.deepcopy(BEFORE)
    for name, value in values.items():
        key = name.replace("__", ".")
        for place in now["facilities"].values() if key.startswith("training.") else [now["federation"]]:
            place[key] = value
    return changes_of(BEFORE, now, done=4)


@given(
    st.dictionaries(st.sampled_from(["rounds", "seed", "new.key", "stop.patience"]), st.integers(11, 99), max_size=4),
    st.sets(st.sampled_from(["a", "b", "c.1", "d", "e"]), min_size=1),
    st.dictionaries(st.sampled_from(["a", "b", "c.1"]), st.sampled_from(["training.steps", "dataset", "x.y"])),
)
def test_whatever_differs_is_listed_once_and_nothing_else(own: dict, names: set, theirs: dict):
    now = copy.deepcopy(BEFORE)
    now["federation"] |= own
    now["facilities"] = {name: dict(now["facilities"].get(name, {"dataset": "/e"})) for name in sorted(names)}
    for name, key in theirs.items():
        if name in now["facilities"]:
            now["facilities"][name][key] = "other"
    found = changes_of(BEFORE, now, done=4)
    assert len({change.key for change in found}) == len(found)
    came, gone = names - set(BEFORE["facilities"]), set(BEFORE["facilities"]) - names
    assert {change.key for change in found if change.now == "joins"} == {f"facilities[{name}]" for name in came}
    assert {change.key for change in found if change.before == "takes part"} == {f"facilities[{one}]" for one in gone}
    assert set(own) <= {change.key for change in found}
    for name, key in theirs.items():
        if name in now["facilities"]:
            assert {key, f"facilities[{name}].{key}"} & {change.key for change in found}
    assert not changes_of(now, now, done=4)


@pytest.mark.parametrize(
    ("values", "affects", "words"),
    [
        ({"rounds": 20}, True, "stretched"),
        ({"rounds": 3}, False, "complete rounds: 4; none follows"),
        ({"stop__patience": 3}, False, "when the federation ends"),
        ({"aggregation__rule": "median"}, True, "models made so far stay"),
        ({"training__steps": 50}, True, "stretched"),
        ({"training__learning_rate": 1e-3}, True, "state is kept"),
        ({"training__optimizer": "muon"}, True, "new state"),
        ({"training__threads": 4}, False, "rounding"),
        ({"privacy__differential__epsilon": 4.0}, True, "no budget covers rounds without noise"),
        ({"what_nobody_knows": 1}, True, "next round"),
    ],
)
def test_what_follows_from_a_change(values: dict[str, Any], affects: bool, words: str):
    (change,) = changed(**values)
    assert change.affects == affects and words in change.follows, change


def test_adapters_keep_the_form_in_which_they_were_begun(tmp_path: Path):
    """An accepted change of their rank let every facility train, or fail, after its wait in the queue, each round."""
    before, now, scale = (copy.deepcopy(BEFORE) for _ in range(3))
    for one, rank, alpha in ((before, 8, 24), (now, 4, 24), (scale, 8, 32)):
        for facility in one["facilities"].values():
            facility |= {"training.lora.rank": rank, "training.lora.alpha": alpha}
    (change,) = changes_of(before, now, done=4)
    assert not change.possible and "another federation" in change.follows
    assert [one.possible for one in changes_of(BEFORE, now, done=4)] == [True, True], "the first adapters begin"
    (change,) = changes_of(before, scale, done=4)
    assert change.possible and "begins with another model" in change.follows, "B A counts by alpha"
    archive = Archive(tmp_path)
    archive.write_note(NOTE, before)
    assert changes_since(archive, now) == [], "nothing was made yet"
    for method in (changes_since, take_over):
        with mock.patch.object(Archive, "rounds", return_value=[0]), pytest.raises(InputError, match=r"rank: 8 -> 4"):
            method(archive, now)


def test_more_rounds_at_a_constant_rate_change_nothing_else():
    before, now = copy.deepcopy(BEFORE), copy.deepcopy(BEFORE)
    for one in (before, now):
        for facility in one["facilities"].values():
            facility["training.schedule"] = "constant"
    now["federation"]["rounds"] = 20
    (change,) = changes_of(before, now, done=4)
    assert not change.affects


def test_a_change_of_one_facility_names_it():
    now = copy.deepcopy(BEFORE)
    now["facilities"]["c.1"]["dataset"] = "/other"
    (change,) = changes_of(BEFORE, now, done=4)
    assert change.key == "facilities[c.1].dataset" and change.affects


def settings_of(path: Path) -> CoordinatorSettings:
    write_rendered(read_federation(path))
    return read_coordinator_settings(path.parent / "coordinator.json")


def test_the_first_step_refuses_what_was_not_accepted_and_the_round_file_tells_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_federation(tmp_path, ["a", "b"], rounds=3)
    archive = Archive(tmp_path / "archive")
    settings = settings_of(path)
    model, _, _ = start(archive, tmp_path / "model", settings)
    updates = [write_update(tmp_path / f"{name}0", model, name) for name in ("a", "b")]
    model, _, _ = close(archive, model, updates, settings, 0)
    assert archive.read_round(0).changes == []
    raw = yaml.safe_load(path.read_text())
    raw["facilities"].pop()
    raw["rounds"] = 5
    path.write_text(yaml.safe_dump(raw))
    fewer = settings_of(path)
    with pytest.raises(InputError, match=r"facilities\[b\].*rounds: 3 -> 5.*--accept"):
        start(archive, tmp_path / "model", fewer)
    archive.write_note("accepted", {"digest": digest_of(fewer.described)})
    model, number, _ = start(archive, tmp_path / "model", fewer)
    assert number == 1 and "accepted" not in archive.read_note("accepted")
    monkeypatch.setattr(
        commit, "drop_recorded_changes", lambda archive: None
    )  # killed before that, the round being there
    close(archive, model, [write_update(tmp_path / "a1", model, "a", round=1)], fewer, 1)
    monkeypatch.undo()
    told = archive.read_round(1).changes
    for words in ("its rounds stay in the history", "stretched", "aggregation.rule: nesterov -> mean"):
        assert any(words in one for one in told), "also what `auto` stands for now that one facility is left"
    page = (CHECKOUT / "docs" / "how-to" / "change-a-running-federation.md").read_text(encoding="utf-8")
    shown = re.findall("^changed: (.*)$", page, re.MULTILINE)
    assert len(shown) == 2 and set(shown) <= set(told), "this is the example of the page"
    assert {row.facility for row in archive.read_round(0).facilities} == {"a", "b"}
    start(archive, tmp_path / "model", fewer)
    close(archive, archive.model_for(2), [write_update(tmp_path / "a2", archive.model_for(2), "a", round=2)], fewer, 2)
    assert archive.read_round(2).changes == [], "told once"


def test_a_description_that_was_removed_is_told_in_the_next_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever was changed together with it went unlisted: the report of all rounds showed none."""
    archive = Archive(tmp_path)
    monkeypatch.setattr(Archive, "rounds", lambda self: [0, 1])
    now = copy.deepcopy(BEFORE)
    now["federation"]["stop.patience"] = 2
    (change,) = take_over(archive, now)
    assert str(change).startswith("federation.json: (none) -> written anew; it is missing in ")
    assert acceptance.unrecorded_changes(archive) == [str(change)]
    assert take_over(archive, now) == [] and acceptance.unrecorded_changes(archive) == [str(change)]


@pytest.mark.parametrize("undone", [False, True])
def test_killed_while_it_takes_a_change_over_a_start_tells_it_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undone: bool
):
    """Told twice where the change stands, and told though it was undone before any round was made under it."""
    archive = Archive(tmp_path / "archive")
    archive.begin(save_pico(tmp_path / "model", dtype="bfloat16"), "f")
    archive.write_note(NOTE, BEFORE)
    monkeypatch.setattr(Archive, "rounds", lambda self: [0, 1])
    now = copy.deepcopy(BEFORE)
    now["federation"]["stop.patience"] = 2
    take_over(archive, now)
    now["federation"]["keep_rounds"] = 5
    with monkeypatch.context() as patch:
        write_note = Archive.write_note
        patch.setattr(Archive, "write_note", lambda *one: _die() if NOTE in one else write_note(*one))
        with pytest.raises(KeyboardInterrupt):
            take_over(archive, now)
    if undone:
        del now["federation"]["keep_rounds"]
    take_over(archive, now)
    for upgraded in range(2):  # keys that an earlier version did not write down are no changes
        now["federation"][f"of_a_later_version_{upgraded}"] = ""
        take_over(archive, now)
    keys = [one.partition(":")[0] for one in acceptance.unrecorded_changes(archive)]
    assert keys == ["stop.patience", *([] if undone else ["keep_rounds"])]


def _die() -> None:
    raise KeyboardInterrupt


def test_a_setting_that_an_earlier_version_did_not_know_is_no_change_at_its_default(tmp_path: Path):
    """After an update of CrossFed, federation.yml was said to have changed, and the run asked for --accept."""
    now = describe_federation(read_federation(write_federation(tmp_path, ["a", "b"])))
    before = copy.deepcopy(now)
    for key in ("aggregation.fisher_power", "evaluation.last_models", "aggregation.screen.norm_ratio"):
        del before["federation"][key]
    for one in before["facilities"].values():
        for key in ("training.unsent_share", "training.images.flip", "training.images.crop_padding"):
            del one[key]
    assert changes_of(before, now, done=1) == []
    now["federation"]["aggregation.fisher_power"] = 1.0
    now["facilities"]["b"]["training.unsent_share"] = 0.25
    found = changes_of(before, now, done=1)
    assert [one.key for one in found if one.affects] == [
        "aggregation.fisher_power",
        "facilities[b].training.unsent_share",
    ]


def test_a_mapping_that_was_empty_is_no_change_beside_its_first_keys():
    """`training.optimizer_parameters: {} -> (none)` was listed beside the parameter that was set."""
    empty, filled = {"training.optimizer_parameters": {}}, {"training.optimizer_parameters.momentum": 0.8}
    pairs = [(empty, filled, filled), (filled, empty, filled), (empty, {}, empty)]
    for before, now, expected in pairs:
        sides = [{"federation": {}, "facilities": {"a": side}} for side in (before, now)]
        assert [one.key for one in changes_of(*sides, done=1)] == list(expected)


def test_a_section_that_was_off_is_a_change_whatever_its_keys_are():
    off = copy.deepcopy(BEFORE)
    off["federation"] |= {"even": None}
    on = copy.deepcopy(BEFORE)
    on["federation"] |= {"even.steps": "auto", "even.least_steps": EvenSettings().least_steps}
    assert {one.key for one in changes_of(off, on, done=4)} == {"rounds.steps", "rounds.least_steps"}
    on = copy.deepcopy(BEFORE)
    on["facilities"]["a"]["trainer.module"] = TrainerSettings().module  # the federation's is another
    assert [one.key for one in changes_of(BEFORE, on, done=4)] == ["facilities[a].trainer.module"]


def test_a_round_that_comes_after_a_rewind_says_so_and_the_next_one_does_not(tmp_path: Path):
    settings = settings_of(write_federation(tmp_path, ["a"], rounds=5, keep_rounds=0))
    archive = Archive(tmp_path / "archive")
    start(archive, tmp_path / "model", settings)

    def make(number: int) -> list[str]:
        model = archive.model_for(number)
        update = write_update(tmp_path / secrets.token_hex(4), model, "a", round=number)
        close(archive, model, [update], settings, number)
        return archive.read_round(number).changes

    assert make(0) == []
    shutil.copytree(archive.round_directory(0) / "state", tmp_path / "state")
    assert make(1) == []
    rewind(archive, 1)
    without = ["begun again by crossfed rewind, from its half-precision model and a fresh server optimizer"]
    assert make(1) == without and f"from round 1 on: {without[0]}" in summary_remarks(summary(archive))
    shutil.move(tmp_path / "state", archive.round_directory(0) / "state")
    rewind(archive, 1)
    assert make(1) == ["begun again by crossfed rewind"] and make(2) == []


def test_the_same_file_describes_the_same(tmp_path: Path):
    path = write_federation(tmp_path, ["a", "b"])
    one, two = describe_federation(read_federation(path)), describe_federation(read_federation(path))
    assert one == two and not changes_of(one, two, done=0)
    assert "host" not in str(one)


def test_what_was_late_when_rounds_began_to_wait_is_named_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "coordinator" / "step").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "coordinator" / "step")
    workdir = tmp_path / "coordinator"
    carrying = {"count": 4, "quorum": 1, "late": "carry"}
    path = write_federation(tmp_path, ["a", "b"], rounds=carrying)
    archive, settings = Archive(tmp_path / "archive"), settings_of(path)
    model, _, _ = start(archive, tmp_path / "model", settings)
    close(archive, model, [write_update(tmp_path / "a0", model, "a")], settings, 0)
    remember_job(workdir, LateJob(facility="b", round=0, directory="/b"))
    start(archive, tmp_path / "model", settings)
    assert remembered_job(workdir, "b") is not None and not caplog.messages
    raw = yaml.safe_load(path.read_text()) | {"rounds": 4}
    path.write_text(yaml.safe_dump(raw))
    waiting = settings_of(path)
    with pytest.raises(InputError, match=r"rounds\.quorum: 1 \(grace auto, late carry\) -> all; rounds wait for all"):
        start(archive, tmp_path / "model", waiting)
    assert remembered_job(workdir, "b") is not None, "nothing changes before it is accepted"
    archive.write_note("accepted", {"digest": digest_of(waiting.described)})
    start(archive, tmp_path / "model", waiting)
    assert remembered_job(workdir, "b") is None
    assert any("b's update of round 0 was late when" in one for one in caplog.messages)


def test_a_change_of_people_is_told_in_the_keys_of_the_file(tmp_path: Path):
    """It named a class of the program, and keys that nobody had given."""
    path = write_federation(tmp_path, ["a", "b"])
    before = describe_federation(read_federation(path))
    path.write_text(path.read_text() + "\ncreators:\n  - {name: Josiah Carberry, affiliation: Brown}\n")
    (change,) = changes_of(before, describe_federation(read_federation(path)), done=1)
    assert "Creator" not in str(change) and "Josiah Carberry" in str(change) and not change.affects
    assert describe_federation(read_federation(path))["federation"]["creators"][0]["affiliation"] == "Brown"
