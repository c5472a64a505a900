"""An update that breaks the aggregation step makes its facility absent, whatever is raised; requests for time end."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.aggregation.request import Request
from coordinator.aggregation.settings import AggregationSettings, ScreenSettings
from coordinator.archive.rounds import Archive
from coordinator.config.settings import CoordinatorSettings
from coordinator.steps import blame, commit
from coordinator.steps.aggregate import close_round
from coordinator.steps.arrived import CollectedRound, drop, sort_out
from facility.exchange.checkpoints.checkpoint import open_checkpoint, save_tensors
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.errors import InputError, TransientError
from facility.exchange.messages.manifest import read_manifest, write_manifest
from facility.exchange.messages.report import Failure
from tests.pico import save_pico
from tests.security.hostile_facility import make_update

NAMES = ["honest", "odd", "other"]


@pytest.fixture
def begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[Archive, list[Path]]:
    (tmp_path / "engine" / "job").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "engine" / "job")
    archive = Archive(tmp_path / "archive")
    archive.begin(save_pico(tmp_path / "model", dtype=getattr(request, "param", "float32")), "pico")
    for name in NAMES:
        make_update(archive.model_for(0), tmp_path / name, federation="pico", facility=name, round=0)
    return archive, [tmp_path / name for name in NAMES]


def closed(archive: Archive, directories: list[Path], **changes: Any) -> tuple[Path, int, bool]:
    settings = CoordinatorSettings(federation="pico", rounds=1, facilities=NAMES, final_evaluation=False, **changes)
    arrived = sort_out(directories, NAMES, 0)
    return close_round(
        CollectedRound(archive=archive, settings=settings, model=archive.model_for(0), number=0, arrived=arrived)
    )


def stumbles_over(monkeypatch: pytest.MonkeyPatch, name: str, raised: type[Exception]) -> None:
    """Let the update of `name` raise as it is averaged."""
    real = commit.aggregate

    def stumbling(request: Request) -> Any:
        if name in request.updates:
            raise raised("[/] \x1b[2J")
        return real(request)

    monkeypatch.setattr(commit, "aggregate", stumbling)
    monkeypatch.setattr(blame, "aggregate", stumbling)


@pytest.mark.parametrize("raised", [RuntimeError, KeyError, ValueError, ZeroDivisionError, RecursionError, TypeError])
def test_whatever_one_update_raises_the_others_are_averaged(
    begun: tuple[Archive, list[Path]], monkeypatch: pytest.MonkeyPatch, raised: type[Exception]
):
    archive, directories = begun
    stumbles_over(monkeypatch, "odd", raised)
    closed(archive, directories)
    rows = {row.facility: row for row in archive.read_round(0).facilities}
    assert {name: row.status for name, row in rows.items()} == {"honest": "ok", "odd": "refused", "other": "ok"}
    assert "cannot be averaged" in rows["odd"].reason and rows["odd"].reason.isprintable()
    assert not [entry for entry in archive.path.iterdir() if entry.name.startswith(".")]


@pytest.mark.parametrize("asked", [{"exclude": ["*lm_head*"]}, {"include": ["*layers*"]}])
def test_whose_update_it_is_is_found_where_updates_hold_a_part_of_the_model(
    begun: tuple[Archive, list[Path]], monkeypatch: pytest.MonkeyPatch, asked: dict[str, list[str]]
):
    archive, directories = begun
    settings = AggregationSettings(rule="mean", **asked)
    for directory in directories:
        held, manifest = open_checkpoint(directory), read_manifest(directory)
        patterns = Patterns(tuple(settings.include), tuple(settings.exclude))
        kept = {name: held.read(name) for name in held.tensors if patterns.federated(name)}
        assert 0 < len(kept) < len(held.tensors)
        (directory / "model.safetensors").unlink()
        save_tensors(directory, kept.items())
        write_manifest(directory, dataclasses.replace(manifest, files={}))
    stumbles_over(monkeypatch, "odd", RuntimeError)
    closed(archive, directories, aggregation=settings)
    rows = {row.facility: row for row in archive.read_round(0).facilities}
    assert {name: row.status for name, row in rows.items()} == {"honest": "ok", "odd": "refused", "other": "ok"}


def test_a_late_update_is_not_blamed_for_being_late(begun: tuple[Archive, list[Path]], tmp_path: Path):
    """Whatever else ends the round: an update that `rounds.late` carries over is as sound as one in time."""
    archive, directories = begun
    closed(archive, directories)
    model, updates = archive.model_for(1), []
    for name, number in zip(NAMES, (1, 0, 1), strict=True):
        updates.append(tmp_path / f"{name}-1")
        make_update(model, updates[-1], federation="pico", facility=name, round=number)
    settings = CoordinatorSettings(
        federation="pico",
        rounds=2,
        facilities=NAMES,
        aggregation=AggregationSettings(rule="mean", maximum_staleness=1),
    )
    arrived = sort_out(updates, NAMES, 1)
    found = blame.to_blame(
        InputError("too few updates"),
        CollectedRound(archive=archive, settings=settings, model=model, number=1, arrived=arrived),
    )
    assert found == {}


@pytest.mark.parametrize("full", [OSError(errno.ENOSPC, "no"), TransientError("the archive could not be written")])
def test_a_disk_that_fills_while_updates_are_tried_alone_is_no_facilitys(
    begun: tuple[Archive, list[Path]], monkeypatch: pytest.MonkeyPatch, full: Exception
):
    archive, directories = begun

    def filling(request: Request) -> None:
        if "odd" in request.updates:
            raise full

    monkeypatch.setattr(blame, "aggregate", filling)
    settings = CoordinatorSettings(federation="pico", rounds=1, facilities=NAMES)
    arrived = sort_out(directories, NAMES, 0)
    collected = CollectedRound(
        archive=archive, settings=settings, model=archive.model_for(0), number=0, arrived=arrived
    )
    assert blame.to_blame(KeyError("odd"), collected) == {}


def test_weights_that_vanish_before_the_mean_are_their_own_facilitys(begun: tuple[Archive, list[Path]]):
    archive, directories = begun
    for file in directories[1].glob("*.safetensors"):
        file.write_bytes(b"\x00" * 7)
    closed(archive, directories)
    assert {row.facility: row.status for row in archive.read_round(0).facilities}["odd"] == "refused"
    assert archive.read_round(0).facilities[0].status == "ok"


@pytest.mark.parametrize("begun", ["float16"], indirect=True)
@pytest.mark.parametrize("rule", ["dare", "dare+nesterov"])
def test_a_step_that_only_the_rule_makes_too_long_is_its_facilitys(begun: tuple[Archive, list[Path]], rule: str):
    """It fits the model's dtype, and so does its plain mean: nobody was to blame, and the run ended for all."""
    archive, directories = begun
    held = open_checkpoint(directories[1])
    tensors = {name: held.read(name).fill_(6e4) for name in held.tensors}
    (directories[1] / "model.safetensors").unlink()
    save_tensors(directories[1], tensors.items())
    write_manifest(directories[1], dataclasses.replace(read_manifest(directories[1]), files={}))
    settings = AggregationSettings(rule=rule, clip_ratio=0.0, screen=ScreenSettings(action="off"))
    closed(archive, directories, aggregation=settings)
    rows = {row.facility: row for row in archive.read_round(0).facilities}
    assert {name: row.status for name, row in rows.items()} == {"honest": "ok", "odd": "refused", "other": "ok"}
    assert "absurdly large" in rows["odd"].reason


def test_nobody_is_blamed_for_what_fails_with_every_update(
    begun: tuple[Archive, list[Path]], monkeypatch: pytest.MonkeyPatch
):
    def broken(_: Request) -> None:
        raise RuntimeError("the kernel is broken")

    monkeypatch.setattr(commit, "aggregate", broken)
    monkeypatch.setattr(blame, "aggregate", broken)
    with pytest.raises(RuntimeError, match="the kernel is broken"):
        closed(*begun)


def test_facilities_that_ask_for_time_in_turns_hold_the_round_no_longer_than_one(
    begun: tuple[Archive, list[Path]], tmp_path: Path
):
    archive, directories = begun
    settings = CoordinatorSettings(federation="pico", rounds=1, facilities=NAMES, final_evaluation=False, come_backs=3)
    whole = sort_out(directories, NAMES, 0)
    granted = 0
    while not archive.rounds() and granted < 20:
        name = ("odd", "other")[granted % 2]
        asking = Failure(facility=name, round=0, reason="ran out of time", again=True)
        arrived = drop(whole, name, 0, "")
        arrived = dataclasses.replace(arrived, failures={name: asking})
        close_round(
            CollectedRound(archive=archive, settings=settings, model=archive.model_for(0), number=0, arrived=arrived)
        )
        granted += 1
    assert granted == 4
    assert CoordinatorSettings(federation="f", rounds=1, facilities=["a"]).come_backs <= 10
    shutil.rmtree(archive.path)


def test_updates_of_more_files_than_may_be_open_are_their_own_facilities_absence(begun: tuple[Archive, list[Path]]):
    """Each could be averaged alone, so that nobody was to blame and the run ended for all."""
    (archive, directories), names = begun, ("odd", "other")
    for directory in directories:
        if directory.name in names:
            found = open_checkpoint(directory)
            tensors = {name: found.read(name) for name in found.tensors}
            for file in {entry.file for entry in found.tensors.values()}:
                file.unlink()
            save_tensors(directory, list(tensors.items()), shard_bytes=1)
            write_manifest(directory, read_manifest(directory))
    count = len(tensors)
    assert count > 20
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + count + 12, hard))
        _, number, _ = closed(archive, directories)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    rows = {row.facility: row for row in archive.read_round(0).facilities}
    assert number == 1 and {name: row.status for name, row in rows.items()} == {
        name: "refused" if name in names else "ok" for name in NAMES
    }
    assert all(f"its tensors lie in {count} files" in rows[name].reason for name in names)
