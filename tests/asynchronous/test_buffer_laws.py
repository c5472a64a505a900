"""Whatever happens to the facilities, each chain ends, each update counts once, and the last mean covers all left."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.aggregation.settings import AggregationSettings
from coordinator.archive.rounds import Archive
from coordinator.asynchronous import buffer as meetings
from coordinator.asynchronous import semidecentral
from coordinator.asynchronous.buffer import Meeting
from coordinator.config.buffering import GroupSettings
from coordinator.config.settings import CoordinatorSettings
from facility.exchange.messages import report as reports
from facility.exchange.messages.manifest import Manifest, write_manifest
from tests.asynchronous.test_semidecentral import make_update
from tests.pico import save_pico


class World:
    """Facilities that train for random times, fail, and a coordinator that is killed, under a clock of its own."""

    def __init__(self, root: Path, seed: int, clock: SimpleNamespace) -> None:
        self.root, self.random, self.clock = root, random.Random(seed), clock
        names = "abcd"[: self.random.randint(2, 4)]
        minimum = self.random.randint(1, 2)
        groups = GroupSettings(
            bound=self.random.randint(0, 3),
            minimum=minimum,
            maximum=self.random.choice([0, 2]),
            window_seconds=self.random.choice([0.0, 5.0, 50.0]),
        )
        settings = CoordinatorSettings(
            federation="f",
            rounds=self.random.randint(1, 4),
            facilities=list(names),
            groups=groups,
            retries=1,
            keep_rounds=1,
            aggregation=AggregationSettings(weights="equal"),
        )
        self.meeting = Meeting(Archive(root / "archive"), settings)
        self.ready: dict[str, float] = {}
        """When each facility that trains has done so; the others wait or have ended."""
        self.ended: set[str] = set()
        self.speed = {name: self.random.choice([1.0, 1.0, 10.0]) for name in names}

    def begin(self) -> None:
        self.meeting.begin(self.root / "model")
        self.ready, self.ended = {}, set()
        self.everybody_looks()

    def everybody_looks(self) -> None:
        """What the steps that wait do, again and again; chains that go on train."""
        for name in self.meeting.settings.facilities:
            if name in self.ready or name in self.ended:
                continue
            answer = self.meeting.next(self.meeting.driver(), name)
            if answer is None:
                self.meeting.look(name)
            elif answer.proceed:
                assert answer.model.is_dir()
                self.ready[name] = self.clock.now + self.speed[name] * self.random.uniform(1, 10)
            else:
                self.ended.add(name)

    def received(self, name: str, round: int) -> Path:
        directory = self.root / "received"
        shutil.rmtree(directory, ignore_errors=True)
        if self.random.random() < 0.25:
            directory.mkdir()
            again = self.random.random() < 0.3
            reports.write(directory, reports.Failure(facility=name, round=round, reason="burnt down", again=again))
            return directory
        shutil.copytree(self.root / f"update-{name}", directory, ignore=shutil.ignore_patterns("manifest.json"))
        write_manifest(directory, Manifest(kind="update", federation="f", round=round, facility=name))
        return directory

    def step(self) -> None:
        """The next thing that happens."""
        driver = self.meeting.driver()
        times = [*self.ready.values(), *([driver.scheduler.wake] if driver.scheduler.wake is not None else [])]
        self.clock.now = max(self.clock.now, min(times, default=self.clock.now))
        for name, when in sorted(self.ready.items(), key=lambda item: item[1]):
            if when <= self.clock.now:
                del self.ready[name]
                round = driver.rounds[name]
                self.meeting.arrive(name, round, self.received(name, round))
                break
        if self.random.random() < 0.05 and not self.meeting.driver().final:
            self.begin()  # the coordinator was killed
        for _ in range(3):
            self.everybody_looks()


@pytest.mark.parametrize("seed", range(16))
def test_every_chain_ends_and_every_update_counts_once(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=1000.0, time=lambda: clock.now)
    monkeypatch.setattr(meetings, "time", clock)
    monkeypatch.setattr(semidecentral, "aggregate", lambda *, base, out, updates, settings: shutil.copytree(base, out))
    monkeypatch.setattr("os.fsync", lambda _: None)
    save_pico(tmp_path / "model", seed=0)
    world = World(tmp_path, seed, clock)
    for name in world.meeting.settings.facilities:
        make_update(tmp_path / f"update-{name}", name, tokens=1, seed=1)
    world.begin()
    for _ in range(400):
        if len(world.ended) == len(world.speed):
            break
        world.step()
    assert len(world.ended) == len(world.speed), (world.ready, world.ended, world.meeting.driver().scheduler.waiting)
    driver = world.meeting.driver()
    if world.meeting.archive.read_note("stopped"):
        return
    *made, final = driver.groups
    assert final["final"] and driver.final == final["model"]
    assert sum(group["final"] for group in driver.groups) == 1
    lost = world.meeting.lost(driver)
    assert set(final["members"]) == set(world.speed) - set(lost)
    for name in world.speed:
        counts = [group["rounds"][name] for group in made if name in group["members"]]
        assert counts == list(range(1, driver.rounds[name] + 1))
        assert name in lost or driver.rounds[name] == world.meeting.settings.rounds
