"""An update that breaks the aggregation step makes its facility absent, whatever is raised; requests for time end."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.archive.rounds import Archive
from coordinator.config.settings import CoordinatorSettings
from coordinator.steps import blame, commit
from coordinator.steps.aggregate import close_round
from coordinator.steps.arrived import drop, sort_out
from facility.exchange.messages.report import Failure
from tests.pico import save_pico
from tests.security.hostile_facility import make_update

NAMES = ["honest", "odd", "other"]


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Archive, list[Path]]:
    (tmp_path / "engine" / "job").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "engine" / "job")
    archive = Archive(tmp_path / "archive")
    archive.begin(save_pico(tmp_path / "model", dtype="float32"), "pico")
    for name in NAMES:
        make_update(archive.model_for(0), tmp_path / name, federation="pico", facility=name, round=0)
    return archive, [tmp_path / name for name in NAMES]


def closed(archive: Archive, directories: list[Path], **changes: Any) -> tuple[Path, int, bool]:
    settings = CoordinatorSettings(federation="pico", rounds=1, facilities=NAMES, final_evaluation=False, **changes)
    arrived = sort_out(directories, NAMES, 0)
    return close_round(archive, settings, model=archive.model_for(0), number=0, arrived=arrived)


@pytest.mark.parametrize("raised", [RuntimeError, KeyError, ValueError, ZeroDivisionError, RecursionError, TypeError])
def test_whatever_one_update_raises_the_others_are_averaged(
    begun: tuple[Archive, list[Path]], monkeypatch: pytest.MonkeyPatch, raised: type[Exception]
):
    archive, directories = begun
    real = commit.aggregate

    def stumbling(*, updates: dict[str, Path], **rest: Any) -> Any:
        if "odd" in updates:
            raise raised("[/] \x1b[2J")
        return real(updates=updates, **rest)

    monkeypatch.setattr(commit, "aggregate", stumbling)
    monkeypatch.setattr(blame, "aggregate", stumbling)
    closed(archive, directories)
    rows = {row.facility: row for row in archive.read_round(0).facilities}
    assert {name: row.status for name, row in rows.items()} == {"honest": "ok", "odd": "refused", "other": "ok"}
    assert "cannot be averaged" in rows["odd"].reason and rows["odd"].reason.isprintable()
    assert not [entry for entry in archive.path.iterdir() if entry.name.startswith(".")]


def test_weights_that_vanish_before_the_mean_are_their_own_facilitys(begun: tuple[Archive, list[Path]]):
    archive, directories = begun
    for file in directories[1].glob("*.safetensors"):
        file.write_bytes(b"\x00" * 7)
    closed(archive, directories)
    assert {row.facility: row.status for row in archive.read_round(0).facilities}["odd"] == "refused"
    assert archive.read_round(0).facilities[0].status == "ok"


def test_nobody_is_blamed_for_what_fails_with_every_update(
    begun: tuple[Archive, list[Path]], monkeypatch: pytest.MonkeyPatch
):
    def broken(**_: Any) -> None:
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
        close_round(archive, settings, model=archive.model_for(0), number=0, arrived=arrived)
        granted += 1
    assert granted == 4
    assert CoordinatorSettings(federation="f", rounds=1, facilities=["a"]).come_backs <= 10
    shutil.rmtree(archive.path)
