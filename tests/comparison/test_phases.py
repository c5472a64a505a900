"""What follows the last round: it ends whatever the facilities answer, misses nothing it could have, tells its gaps."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from coordinator.archive.rounds import Archive
from coordinator.comparison.account import read_account
from coordinator.comparison.matrix import matrix
from coordinator.comparison.models import batches
from coordinator.comparison.phases import with_earlier
from coordinator.config.closing import EvenSettings
from coordinator.config.evaluation import ComparisonSettings
from coordinator.config.privacy import PrivacySettings
from coordinator.config.settings import CoordinatorSettings
from coordinator.steps.aggregate import close_round, sort_out
from coordinator.steps.arrived import CollectedRound
from coordinator.steps.expectation import Earlier, Expected
from coordinator.steps.receive import receive
from coordinator.steps.start import start
from facility.exchange.messages import report
from facility.exchange.messages.comparison import (
    ALONE,
    MODELS,
    STEPS,
    Alone,
    Figure,
    Interval,
    expected_of,
    folders_of,
    rounds_alone,
    steps_alone,
    with_alone,
    with_figures,
    with_missing,
)
from facility.exchange.messages.manifest import Manifest, read_manifest, run_of, with_run, write_manifest
from facility.exchange.messages.report import Failure
from tests.aggregation.updates import write_update
from tests.pico import save_pico

NAMES = ["a", "b"]
SETTINGS = CoordinatorSettings(
    federation="f",
    rounds=2,
    facilities=NAMES,
    final_evaluation=False,
    comparison=ComparisonSettings(alone=True, models_per_job=4),
)


class World:
    """A coordinator and facilities that answer at once, through the steps of the workflow."""

    def __init__(self, root: Path, settings: CoordinatorSettings = SETTINGS) -> None:
        self.root, self.settings, self.passes = root, settings, 0
        self.archive = Archive(root / "archive")
        self.model, self.number, self.proceed = start(
            self.archive, save_pico(root / "model", dtype="bfloat16"), settings
        )
        self.done: dict[str, int] = {}
        self.seen: list[tuple[str, list[str]]] = []
        self.losses: dict[str, float] = {}
        """Of models at every facility, where it is not 2."""
        self.lost: dict[str, str] = {}
        """Models of facilities' own that are not there any more, and why."""

    def go_on(self, absent: tuple[str, ...] = ()) -> None:
        """One pass of the loop."""
        self.passes += 1
        place = self.root / f"pass-{self.passes}"
        answers = []
        for name in self.settings.facilities:
            update = None if name in absent else self.answer(place / name / "update", name)
            answers.append(self.received(update, name, place / name / "received"))
        arrived = sort_out(answers, self.settings.facilities, self.number)
        self.model, self.number, self.proceed = close_round(
            CollectedRound(
                archive=self.archive, settings=self.settings, model=self.model, number=self.number, arrived=arrived
            )
        )

    def received(self, update: Path | None, name: str, out: Path) -> Path:
        failure = receive(
            update,
            Expected(
                facility=name,
                round=self.number,
                model=self.model,
                evaluation=self.number >= self.settings.rounds,
                masks=self.settings.masks if self.number >= self.settings.rounds else None,
                settings=self.settings.aggregation,
                earlier=Earlier(archive=self.archive, facility=name),
            ),
            decoded=out.with_name("decoded"),
        )
        if failure is None:
            assert update is not None
            return update
        out.mkdir(parents=True)
        report.write(out, failure)
        return out

    def answer(self, out: Path, name: str) -> Path:
        sent = read_manifest(self.model)
        if sent.kind == "model":
            return write_update(out, self.model, name, round=self.number, move=0.02 if name == "a" else 0.01)
        if sent.kind == ALONE:
            return self.train_alone(out, name, sent)
        folders = expected_of(sent, name)
        self.seen.append((name, folders))
        assert sorted(path.name for path in self.model.iterdir() if path.is_dir()) == sorted(folders_of(sent))
        empty(out, sent, name)
        losses = {folder: self.losses.get(folder, 2.0) for folder in folders if folder not in self.lost}
        ends = {folder: Interval(value=loss, low=loss - 0.1, high=loss + 0.1) for folder, loss in losses.items()}
        with_figures(out, [Figure(model=one, loss=ends[one], blocks=4, predictions=60) for one in losses])
        with_missing(out, {folder: reason for folder, reason in self.lost.items() if folder in folders})
        return out

    def train_alone(self, out: Path, name: str, sent: Manifest) -> Path:
        wanted = rounds_alone(sent, name)
        if name not in self.done:
            assert (self.model / "model.safetensors").is_file(), "the initial model is sent to who needs it"
        self.done[name] = min(wanted, self.done.get(name, 0) + 1)
        if self.done[name] < wanted or self.settings.masks is not None:
            empty(out, sent, name)
        else:
            write_update(out, self.archive.model_for(0), name, round=sent.round, move=0.5)
            told = dataclasses.replace(read_manifest(out), base_sha256=sent.content_sha256)
            write_manifest(out, told)
        with_alone(out, Alone(rounds=self.done[name], of=wanted, tokens=100 * self.done[name]))
        return out


def empty(out: Path, sent: Manifest, name: str) -> None:
    """An answer without weights."""
    out.mkdir(parents=True)
    figures = dict(loss_received=2.0, loss_returned=2.0, perplexity_received=7.4, perplexity_returned=7.4)
    told = report.Report(
        federation="f", facility=name, round=sent.round, samples=0, tokens=0, steps=0, training_loss=2.0, **figures
    )
    report.write(out, told)
    write_manifest(
        out,
        Manifest(kind="update", federation="f", round=sent.round, facility=name, base_sha256=sent.content_sha256),
    )
    with_run(out, run_of(sent))


def test_all_models_are_evaluated_by_all_after_as_many_rounds_alone(tmp_path: Path):
    world = World(tmp_path)
    world.go_on()
    world.go_on()
    assert read_manifest(world.model).kind == ALONE and world.proceed
    world.go_on()
    assert not list(world.model.glob("*.safetensors"))  # nobody needs the initial model a second time
    world.go_on()
    assert read_manifest(world.model).kind == MODELS and world.done == {"a": 2, "b": 2}
    world.go_on()
    assert world.proceed
    world.go_on()
    assert not world.proceed and world.number == SETTINGS.rounds
    assert [folders for name, folders in world.seen if name == "a"] == [
        ["global", "initial", "update.a", "update.b"],
        ["global", "alone.a", "alone.b"],
    ]
    told = matrix(world.archive, {}, NAMES)
    assert told["models"] == ["initial", "global", "a's update", "b's update", "a alone", "b alone"]
    assert len(told["cells"]) == 12 and told["complete"] and not told["gaps"]
    assert {one["tokens"] for one in told["alone"].values()} == {200}
    assert not (world.archive.path / "comparison").exists()  # single updates are not kept
    assert world.archive.rounds() == [0, 1]  # and nothing of it entered the archive's line of models


@pytest.mark.parametrize("even", [None, EvenSettings(steps="elastic")])
def test_rounds_alone_are_asked_for_as_many_steps_as_the_updates_took(tmp_path: Path, even: EvenSettings | None):
    """Where steps follow the queues a facility trained alone for those of its settings, and was compared with it."""
    world = World(tmp_path, dataclasses.replace(SETTINGS, even=even, steps=dict.fromkeys(NAMES, 10)))
    for _ in range(2):
        world.go_on()
    taken = {
        name: [row.steps for e in world.archive.history() for row in e.facilities if row.facility == name]
        for name in NAMES
    }
    sent = read_manifest(world.model)
    assert sent.kind == ALONE and sent.extra.get(STEPS) == (taken if even else None)
    assert [steps_alone(sent, "a", done, most=9) for done in range(3)] == ([*taken["a"], None] if even else [None] * 3)


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path):
    world = World(tmp_path)
    for _ in range(3):
        world.go_on()
    before = read_manifest(world.model)
    model, number, proceed = start(world.archive, tmp_path / "model", SETTINGS)
    assert (read_manifest(model), number, proceed) == (before, SETTINGS.rounds, True)
    shutil.rmtree(world.archive.path / "comparison" / "sent")
    world.model, _, _ = start(world.archive, tmp_path / "model", SETTINGS)
    while world.proceed:
        world.go_on()
    assert len(matrix(world.archive, {}, NAMES)["cells"]) == 12
    assert start(world.archive, tmp_path / "model", SETTINGS)[2] is False


@pytest.mark.parametrize(("before", "then"), [(2, 8), (3, 4), (8, 2)])
def test_models_are_evaluated_once_whatever_models_per_job_becomes_in_between(before: int, then: int, tmp_path: Path):
    def at_once(most: int) -> CoordinatorSettings:
        return dataclasses.replace(SETTINGS, comparison=ComparisonSettings(models_per_job=most))

    world = World(tmp_path, at_once(before))
    for _ in range(3):
        world.go_on()
    world.settings = at_once(then)
    world.model, world.number, world.proceed = start(world.archive, tmp_path / "model", world.settings)
    while world.proceed:
        world.go_on()
    sent = [folder for name, folders in world.seen if name == "a" for folder in folders if folder != "global"]
    assert sent == ["initial", "update.a", "update.b"]
    assert matrix(world.archive, {}, NAMES)["complete"]


def test_a_comparison_of_which_a_facility_has_left_goes_on_or_is_over(tmp_path: Path):
    settings = dataclasses.replace(SETTINGS, comparison=ComparisonSettings(models_per_job=3))
    world = World(tmp_path, settings)
    for _ in range(3):
        world.go_on()
    alone = dataclasses.replace(settings, facilities=["a"])
    assert start(world.archive, tmp_path / "model", alone)[2] is False, "b's update alone was left to evaluate"
    assert matrix(world.archive, {}, ["a"])["complete"]


def test_nobody_waits_for_the_training_alone_of_a_facility_that_has_left(tmp_path: Path):
    world = World(tmp_path, dataclasses.replace(SETTINGS, retries=9))
    for absent in ((), (), ("b",)):
        world.go_on(absent)
    assert read_manifest(world.model).kind == ALONE
    world.settings = dataclasses.replace(world.settings, facilities=["a"])
    world.model, world.number, world.proceed = start(world.archive, tmp_path / "model", world.settings)
    while world.proceed:
        world.go_on()
        assert world.passes < 9
    told = matrix(world.archive, {}, ["a"])
    assert told["complete"] and told["models"] == ["initial", "global", "a's update", "a alone"]


def test_batches_that_an_earlier_version_counted_are_not_sent_again(tmp_path: Path):
    settings = dataclasses.replace(SETTINGS, comparison=ComparisonSettings(models_per_job=2))
    world = World(tmp_path, settings)
    for _ in range(3):
        world.go_on()
    note = world.archive.read_note("comparison")
    del note["evaluated"]
    world.archive.write_note("comparison", note)
    while world.proceed:
        world.go_on()
    sent = [folder for name, folders in world.seen if name == "a" for folder in folders if folder != "global"]
    assert sent == ["initial", "update.a", "update.b"]


MASKED = dataclasses.replace(
    SETTINGS,
    privacy=PrivacySettings(secure_aggregation=True, peer_signers="/keys"),
    comparison=ComparisonSettings(alone=True, updates=False, models_per_job=4),
)
"""The rounds themselves are plain here: what is looked at is the comparison."""


def test_under_masks_each_facility_evaluates_its_own_models_and_the_coordinator_gets_none(tmp_path: Path):
    world = World(tmp_path, MASKED)
    world.lost = {"update.b": "the update of round 1, the last that counted, is not kept here; none is"}
    while world.proceed:
        world.go_on()
        assert world.passes < 9
        weights = [path.parent.name for path in (world.archive.path / "comparison").rglob("*.safetensors")]
        assert set(weights) <= {"sent", "global", "initial"}, weights  # `sent`: the initial model, to train alone from
    assert world.done == {"a": 2, "b": 2}
    assert world.seen == [(name, ["global", "initial", f"update.{name}", f"alone.{name}"]) for name in NAMES]
    told = matrix(world.archive, {"privacy": {"secure_aggregation": True}}, NAMES)
    assert {(one["facility"], one["model"]) for one in told["cells"]} == {
        *((name, model) for name in NAMES for model in ("initial", "global", f"{name} alone")),
        ("a", "a's update"),
    }
    assert "update.b: the update of round 1" in told["gaps"]["b"] and "a" not in told["gaps"]
    assert "evaluated them itself" in told["caption"] and told["complete"]


@pytest.mark.parametrize("kind", ["alone", "figures", "another's figures"])
def test_an_answer_that_holds_weights_or_anothers_model_is_refused_under_masks(tmp_path: Path, kind: str):
    world = World(tmp_path, MASKED)
    while world.proceed and read_manifest(world.model).kind != (ALONE if kind == "alone" else MODELS):
        world.go_on()
    sent, out = read_manifest(world.model), tmp_path / "odd" / "update"
    if kind == "another's figures":
        world.answer(out, "a")
        loss = Interval(value=2.0, low=1.9, high=2.1)
        with_figures(out, [Figure(model="update.b", loss=loss, blocks=4, predictions=60)])
    else:
        write_update(out, world.archive.model_for(0), "a", round=sent.round, move=0.5)
        write_manifest(out, dataclasses.replace(read_manifest(out), base_sha256=sent.content_sha256))
        with_run(out, run_of(sent))
        if kind == "alone":
            with_alone(out, Alone(rounds=2, of=2, tokens=1))
        else:
            with_figures(out, [])
    failure = report.read_failure(world.received(out, "a", tmp_path / "odd" / "received"))
    assert isinstance(failure, Failure) and failure.kind == "refused", failure
    assert ("expected one of" if kind == "another's figures" else "holds weights") in failure.reason


@pytest.mark.parametrize("retries", [0, 2])
def test_an_absent_facility_is_a_gap_with_its_reason_and_nobody_waits_for_ever(tmp_path: Path, retries: int):
    world = World(tmp_path, dataclasses.replace(SETTINGS, retries=retries))
    world.go_on()
    world.go_on()
    while world.proceed:
        world.go_on(absent=("b",))
        assert world.passes < 20
    told = matrix(world.archive, {}, NAMES)
    assert told["data"] == ["a"] and "b alone" not in told["models"] and "b's update" in told["models"]
    assert "left no update" in told["gaps"]["b"] and "a" not in told["gaps"]
    account = read_account(world.archive)
    assert account is not None and account.alone["b"].failed > retries and not account.alone["b"].rounds


def test_more_rounds_make_another_comparison(tmp_path: Path):
    world = World(tmp_path)
    while world.proceed:
        world.go_on()
    longer = dataclasses.replace(SETTINGS, rounds=3)
    world.settings = longer
    world.model, world.number, world.proceed = start(world.archive, tmp_path / "model", longer)
    assert world.number == 2 and matrix(world.archive, {}, NAMES)["complete"]
    world.go_on()
    assert matrix(world.archive, {}, NAMES) == {}
    while world.proceed:
        world.go_on()
    assert world.done == {"a": 3, "b": 3} and matrix(world.archive, {}, NAMES)["complete"]


@pytest.mark.parametrize("told", ["more rounds", "no figures", "another order", "not finite"])
def test_an_answer_that_cannot_be_is_its_facilitys_absence(tmp_path: Path, told: str):
    import torch

    from facility.exchange.checkpoints.checkpoint import open_checkpoint, save_tensors

    world = World(tmp_path)
    world.go_on()
    world.go_on()
    sent = read_manifest(world.model)
    update = world.answer(tmp_path / "odd" / "update", "a")
    if told == "more rounds":
        with_alone(update, Alone(rounds=3, of=3, tokens=1))
    if told == "no figures":
        write_manifest(update, dataclasses.replace(read_manifest(update), extra={"run": run_of(sent)}))
    if told == "another order":
        write_manifest(update, dataclasses.replace(read_manifest(update), base_sha256="0" * 64))
    if told == "not finite":
        checkpoint = open_checkpoint(world.archive.model_for(0))
        tensors = [(name, torch.full_like(checkpoint.read(name), torch.nan)) for name in checkpoint.tensors]
        save_tensors(update, tensors)
        write_manifest(update, read_manifest(update))
        with_alone(update, Alone(rounds=2, of=2, tokens=1))
    out = world.received(update, "a", tmp_path / "odd" / "received")
    failure = report.read_failure(out)
    assert isinstance(failure, Failure) and failure.kind == "refused", failure


@pytest.mark.parametrize(("models", "most"), [(2, 8), (6, 4), (6, 1), (130, 8)])
def test_batches_hold_every_model_once_and_the_global_one_always(models: int, most: int):
    folders = ["global", "initial", *map(str, range(models - 2))]
    made = batches(folders, most)
    assert all(batch[0] == "global" and len(batch) <= max(2, most) for batch in made)
    assert [name for batch in made for name in batch[1:]] == folders[1:]


def test_why_figures_are_missing_is_told_of_every_batch():
    assert with_earlier("", "b") == "b" and with_earlier("a", "b") == "a; b"
    assert with_earlier("a; b", "b") == with_earlier("b", "a; b") == "a; b", "of a batch that was sent again"
