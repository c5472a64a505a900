"""Going back a round: nothing is deleted, and `start` goes on from the model that the round started from."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from time import strftime
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.archive.journal import Entry, Journal, without_rewound
from coordinator.archive.remarks import summary_remarks
from coordinator.archive.rewind import lacks_state, rewind, rounds_set_aside
from coordinator.archive.rounds import CHANGES, COMPARED, Archive, FacilityRow, RoundFile
from coordinator.archive.summary import summary
from coordinator.config.closing import LimitSettings
from coordinator.planning.pace import times_beside_training
from coordinator.report.data import gather
from coordinator.report.timeline import segments
from coordinator.rounds.acceptance import unrecorded_changes
from coordinator.rounds.late import discount, discounted
from coordinator.steps.limits import exceeded_in
from coordinator.steps.start import start
from facility.exchange.errors import InputError, ManifestError
from facility.exchange.files.durable import write_json
from tests.archive.test_archive import SETTINGS, close
from tests.engine.harms import flipped


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
    weights.write_bytes(flipped(weights.read_bytes()))
    with pytest.raises(ManifestError, match="altered; restore that file from a copy, or go back to another round"):
        rewind(archive, 2)
    assert archive.rounds() == [0, 1, 2]


def test_a_round_whose_state_was_pruned_begins_without_one_until_it_is_complete(archive: Archive):
    archive.prune(0)
    assert [archive.state_for(n) is not None and archive.state_for(n).is_dir() for n in (1, 2, 3)] == [
        False,
        False,
        True,
    ]
    assert not lacks_state(archive, 3) and lacks_state(archive, 2)
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
    assert unrecorded_changes(archive) == ["seed: 1 -> 2"], (
        "what a damaged file told is lost, and keeps nobody from going back"
    )
    rewind(archive, 2)
    assert unrecorded_changes(archive) == ["aggregation.rule: mean -> trimmed_mean", "seed: 1 -> 2"]
    start(archive, pico_llama, SETTINGS)
    assert unrecorded_changes(archive) == ["aggregation.rule: mean -> trimmed_mean", "seed: 1 -> 2"]
    rewind(archive, 0)
    assert unrecorded_changes(archive) == [], "no model was made under others"


def test_updates_of_rounds_set_aside_are_no_longer_compared(archive: Archive):
    for name in ("a", "b"):
        (archive.path / COMPARED / f"update.{name}").mkdir(parents=True)
    aside = rewind(archive, 2)
    assert [path.name for path in (archive.path / COMPARED).iterdir()] == ["update.b"], "of a round before"
    assert (aside / COMPARED / "update.a").is_dir()


@pytest.mark.parametrize("back", [True, False], ids=["rewound", "more rounds"])
def test_a_loss_of_a_final_evaluation_that_is_not_the_last_any_more_stays_paid_for(archive: Archive, back: bool):
    """Its facility takes part in no later round, whose report would count it."""
    budget = dict.fromkeys(("epsilon", "delta", "clip", "spent", "noise_multiplier", "sampling_rate"), 1.0)
    budget |= {"unit": "block", "steps": 9, "spent_on_validation": 0.7, "validation_deviation": 0.1}
    row = FacilityRow(round=3, facility="b", status="ok", privacy=budget)
    archive.write_note("evaluation", {"after_round": 2, "facilities": [dataclasses.asdict(row)]})
    if back:
        rewind(archive, 2)
    close(archive, 2 if back else 3)
    found = gather(archive, federation="f", settings={})
    assert found["final_evaluation"] == [] and found["privacy"]["epsilon_of_validation"] == 0.7
    assert any("epsilon 0.7 of its validation data" in line for line in found["remarks"])


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


def killed_in_rewind(archive: Archive, to: int, after: int) -> bool:
    """Whether a kill came in the rewind, which it does before the step `after` that leaves a trace on the disk."""
    left = [after]

    def counted(original: Any) -> Any:
        def step(*words: Any, **options: Any) -> Any:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return original(*words, **options)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [(Path, "rename"), (Path, "mkdir"), (Archive, "write_note"), (Archive, "drop_note")]:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        for owner, name in [(Archive, "write_history"), (Journal, "append")]:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            rewind(archive, to)
        except KeyboardInterrupt:
            return True
    return False


@pytest.mark.parametrize("then", ["start", "rewind"])
def test_killed_anywhere_a_rewind_is_complete_or_has_not_begun(
    archive: Archive, tmp_path: Path, pico_llama: Path, then: str
):
    """No round is begun from what a rewind left half moved: its state was pruned, its jobs would be for nothing."""
    (archive.path / COMPARED / "update-of-a").mkdir(parents=True)
    archive.prune(0)
    close(archive, 3, changes=["seed: 1 -> 2"])
    archive.prune(0)
    seen = set()
    for after in range(99):
        copy = Archive(tmp_path / f"copy-{after}")
        shutil.copytree(archive.path, copy.path)
        killed = killed_in_rewind(copy, 1, after)
        if then == "start":
            start(copy, pico_llama, SETTINGS)
        else:
            rewind(copy, 1)  # also where it was complete, and no more than its answer was lost
        seen.add(len(copy.rounds()))
        (aside,) = [one for one in copy.path.glob("rewound-*") if list(one.glob("round-*"))] or [None]
        assert copy.rounds() == ([0, 1, 2, 3] if aside is None else [0])
        if aside is not None:
            assert sorted(path.name for path in aside.glob("round-*")) == [f"round-{n:04d}" for n in (1, 2, 3)]
            assert unrecorded_changes(copy) == ["seed: 1 -> 2"] and copy.state_for(1) is None
        if not killed:
            break
    assert not killed and after > 10 and seen == ({1, 4} if then == "start" else {1})


def test_a_state_that_is_missing_is_told_before_a_round_begins(archive: Archive, pico_llama: Path):
    shutil.rmtree(archive.round_directory(2) / "state")
    with pytest.raises(ManifestError, match=r"round-0002/state is missing; .*crossfed rewind --to 2"):
        start(archive, pico_llama, dataclasses.replace(SETTINGS, rounds=9))


HOUR = 3600.0


class Timed:
    """A federation of one facility whose every round takes an hour of one node, and its journal."""

    def __init__(self, archive: Archive) -> None:
        self.archive, self.journal, self.now = archive, Journal(archive.path), 1000.0

    def note(self, kind: str, number: int | None, **detail: object) -> None:
        name = "a" if kind != "rewound" else ""
        self.journal.append(kind, time=self.now, facility=name, round=number, **detail)

    def make(self, number: int, *, hours: float = 1.0, trained: float | None = None) -> None:
        """A job that is in its queue for 10 s, and then at work for so long, of which it trains a part."""
        self.note("queued", number)
        self.now += 10
        self.note("started", number)
        self.now += hours * HOUR
        self.note("trained", number, code=0)
        self.note("transferred", number, bytes=5, seconds=1.0, what="update")
        place = self.archive.round_directory(number)
        place.mkdir()
        seconds = hours * HOUR
        row = FacilityRow(
            round=number,
            facility="a",
            status="ok",
            seconds=seconds,
            steps=1,
            samples=1,
            tokens=100,
            tokens_per_second=100 / (seconds if trained is None else trained * HOUR),
            usage={"node_seconds": seconds},
        )
        write_json(
            place / "round.json",
            dataclasses.asdict(RoundFile(round=number, facilities=[row], global_loss=1.0, decision="go on")),
        )

    def back(self, to: int) -> None:
        if to:
            shutil.copytree(self.archive.model_for(0), self.archive.model_for(to))
        rewind(self.archive, to)


@pytest.fixture
def timed(tmp_path: Path, pico_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Timed:
    archive = Archive(tmp_path / "archive")
    start(archive, pico_llama, SETTINGS)
    timed = Timed(archive)
    monkeypatch.setattr("coordinator.archive.rewind.time", SimpleNamespace(time=lambda: timed.now, strftime=strftime))
    return timed


def test_a_budget_counts_what_was_set_aside_and_expects_of_a_round_what_it_takes_once(timed: Timed):
    """Of 7.5 node-hours five rounds take five; made again, two more fit, and the third would exceed them."""
    settings = dataclasses.replace(SETTINGS, limits=LimitSettings(node_hours=7.5), final_evaluation=False)
    for number in range(5):
        timed.make(number)
    timed.back(0)
    for number, ends in enumerate([False, True]):
        timed.make(number)
        found = exceeded_in(timed.archive, settings, timed.archive.history(), timed.now)
        assert (found is not None) == ends, number
    assert found is not None and found.reason.startswith("7 of 7.5 node-hours are spent")
    assert found.reason.endswith("expected to need 1")
    timed.note("queued", 2)
    timed.note("started", 2)  # it fails, and leaves no report
    timed.now += HOUR
    timed.note("trained", 2, code=7)
    timed.back(1)
    found = exceeded_in(timed.archive, settings, timed.archive.history(), timed.now)
    assert found is not None and found.reason.startswith("8 of 7.5 node-hours are spent")


def test_the_report_counts_all_that_was_spent_and_says_so(timed: Timed):
    for number in range(3):
        timed.make(number)
    timed.back(1)
    timed.make(1)
    assert [one.round for one in rounds_set_aside(timed.archive)] == [1, 2]
    data = gather(timed.archive, federation="f", settings={})
    assert data["cost"]["total"]["node_hours"] == pytest.approx(4.0)
    assert data["traffic"]["a"]["from_bytes"] == 4 * 5
    assert any(
        "set aside by crossfed rewind: 2 rounds, which" in line for line in summary_remarks(summary(timed.archive))
    )
    lost = [one for one in segments(timed.journal.read(), {}) if one.kind == "lost"]
    assert sum(one.seconds for one in lost) == pytest.approx(2 * HOUR)
    assert {one.round for one in lost} == {1, 2}


def test_what_a_job_needs_beside_training_is_not_told_of_another_rounds_job(timed: Timed):
    """Rounds of an hour are made again with a tenth of the steps; the old jobs' time is no wait of the new ones."""
    for number in range(2):
        timed.make(number)
    timed.back(0)
    for number in range(2):
        timed.make(number, hours=0.1, trained=0.1)
    rows = [row for entry in timed.archive.history() for row in entry.facilities]
    assert times_beside_training(timed.journal.read(), rows)["a"] == pytest.approx([9.0, 9.0])


def test_without_a_rewind_nothing_is_left_out() -> None:
    entries = [Entry(time=1.0, kind="queued", facility="a", round=1), Entry(time=2.0, kind="run_ended")]
    assert without_rewound(entries) == entries
    back = Entry(time=3.0, kind="rewound", round=1)
    assert without_rewound([*entries, back]) == entries[1:]
    assert without_rewound([*entries, back, entries[0]]) == [entries[1], entries[0]]
