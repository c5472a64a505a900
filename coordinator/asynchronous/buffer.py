"""Where the facilities' chains meet: the state below the archive, what an arrival changes, and where a chain goes on.

    ARCHIVE/groups/
        state.json          the scheduler, every facility's model and round, groups, failures
                            (coordinator.asynchronous.semidecentral)
        group-000004/       the mean of that group, while a facility still trains from it
        updates/NAME-0003/  the last update of each facility: of its group, then of the final mean

Every change happens under a lock, by whichever step sees it first: the step of one facility carries out the group of
another. The state is written last, so a step that is killed at any moment changed nothing or everything.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coordinator.archive.rounds import Archive
from coordinator.asynchronous.semidecentral import STATE, Reduced, SemiDecentralised
from coordinator.config.settings import CoordinatorSettings
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import ConfigurationError, InputError, ManifestError, TryAgain, UpdateRefused
from facility.exchange.files.durable import new_directory
from facility.exchange.files.links import link_tree
from facility.exchange.files.storage import is_storage
from facility.exchange.messages.manifest import verify_manifest
from facility.exchange.messages.report import Failure, read_failure, read_report
from facility.exchange.messages.strict_json import clean

FOLDER = "groups"


@dataclass(frozen=True, kw_only=True)
class Next:
    """What a facility's chain does now."""

    model: Path
    round: int
    proceed: bool
    why: str


class Meeting:
    """Access to the groups of one archive; holds no state of its own."""

    def __init__(self, archive: Archive, settings: CoordinatorSettings) -> None:
        assert settings.groups is not None
        self.archive, self.settings, self.groups = archive, settings, settings.groups
        self.place = archive.path / FOLDER

    def driver(self) -> SemiDecentralised:
        """The state as it is now. Raises `InputError` where there is none."""
        return SemiDecentralised(self.place, aggregation=self.settings.aggregation, base=self.archive.model_for(0))

    @contextmanager
    def alone(self) -> Iterator[tuple[SemiDecentralised, float]]:
        """Hold the lock; yields the state and the time (Unix seconds), which never runs backwards."""
        self.place.mkdir(parents=True, exist_ok=True)
        with open(self.place / ".lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            driver = self.driver()
            yield driver, max(time.time(), driver.now)

    # -- the beginning ----------------------------------------------------------------------------------------------
    def begin(self, model: Path) -> SemiDecentralised:
        """Begin with the initial model, or go on where the facilities stand; the first step of every run.

        Raises `InputError` when the archive does not fit the federation, `ManifestError` when a model is damaged.
        """
        self.archive.begin(model, self.settings.federation)
        self.archive.clean()
        self.archive.drop_note("stopped")
        if self.archive.rounds():
            raise InputError(
                f"archive {self.archive.path} holds rounds, groups cannot go on from them: choose another archive"
            )
        wanted = self.settings.aggregation.weights
        if not (self.place / STATE).exists():
            initial = self.archive.model_for(0)
            SemiDecentralised.start(
                self.place, self.settings.facilities, self.groups.rules(), weights=str(wanted), model=initial
            )
        with self.alone() as (driver, now):
            self._check(driver)
            for leftover in self.place.glob(".*.tmp"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            for path in sorted({driver.final} if driver.final else set(driver.models.values())):
                verify_manifest(Path(path))
            driver.scheduler.rules = self.groups.rules()
            driver.runs += 1
            driver.save()
            if not driver.final:
                self._recall(driver, now)
            return driver

    def _check(self, driver: SemiDecentralised) -> None:
        """Raise `InputError` unless the state is of this federation as it is now."""
        if (found := sorted(driver.rounds)) != (expected := sorted(self.settings.facilities)):
            raise InputError(
                f"{driver.state} was begun with facilities {', '.join(found)}, federation.yml has "
                f"{', '.join(expected)}: choose another archive"
            )
        if driver.weights != (wanted := self.settings.aggregation.weights):
            raise InputError(
                f"{driver.state} was begun with weights {driver.weights}, federation.yml has {wanted!r}: set it back"
            )
        for name in driver.rounds:
            if self.finished(driver, name) and driver.rounds[name] < self.settings.rounds:
                raise InputError(
                    f"facility {name!r} has finished after {driver.rounds[name]} rounds, federation.yml now has "
                    f"{self.settings.rounds}: choose another archive, with {driver.final or 'the final mean'} as its "
                    "model"
                )

    # -- an arrival -------------------------------------------------------------------------------------------------
    def arrive(self, facility: str, round: int, received: Path) -> list[Reduced]:
        """What the receive step of a facility left, a sound update or a failure; a repeated one changes nothing."""
        with self.alone() as (driver, now):
            if driver.rounds[facility] != round or facility in driver.scheduler.waiting or driver.final:
                return []
            try:
                failure = read_failure(received)
                update = None if failure else self._keep(facility, round, received)
            except ManifestError as error:
                failure, update = self._refused(facility, round, error), None
            if failure is not None or update is None:
                assert failure is not None
                return self._fail(driver, facility, failure, now)
            reduced = []
            try:
                if facility not in driver.scheduler.members:
                    reduced += driver.join(facility, now, returning=False)
                reduced += driver.ready(facility, update, now)
            except UpdateRefused as error:
                if error.facility != facility:
                    raise
                return reduced + self._fail(self.driver(), facility, self._refused(facility, round, error), now)
            except Exception as error:  # whatever an update does to our code is its facility's absence
                if not self._to_blame(error, update):
                    raise
                return reduced + self._fail(self.driver(), facility, self._refused(facility, round, error), now)
            self._prune(driver)
            return reduced

    @staticmethod
    def _refused(facility: str, round: int, error: Exception) -> Failure:
        reason = str(error) if isinstance(error, UpdateRefused) else f"its update cannot be averaged: {error!r}"
        return Failure(facility=facility, round=round, reason=clean(reason), kind="refused")

    def _to_blame(self, error: Exception, update: Path) -> bool:
        """True when the update itself cannot be read any more; a fault of this machine blames no facility."""
        if isinstance(error, TryAgain | MemoryError) or is_storage(error):
            return False
        try:
            verify_manifest(update)
            checkpoint = open_checkpoint(update)
            for name in checkpoint.tensors:
                checkpoint.read(name)
            read_report(update)
        except Exception:
            return True
        return False

    def _keep(self, facility: str, round: int, received: Path) -> Path:
        """The update in a place of its own: the engine's directories are not ours."""
        place = self.place / "updates" / f"{facility}-{round:04d}"
        shutil.rmtree(place, ignore_errors=True)  # of a step that was killed before it wrote the state
        with new_directory(place) as temporary:
            link_tree(received, temporary / "update")
        return place / "update"

    def _fail(self, driver: SemiDecentralised, name: str, failure: Failure, now: float) -> list[Reduced]:
        """Nobody waits for a facility that failed; one that only wants more time stays."""
        driver.failures.append(
            {
                "facility": name,
                "round": driver.rounds[name],
                "kind": failure.kind,
                "reason": failure.reason,
                "again": failure.again,
                "run": driver.runs,
            }
        )
        lost = self.lost(driver)
        if name not in lost and failure.again:
            driver.save()
            return []
        left = [other for other in driver.rounds if other not in lost]
        if len(left) < self.settings.minimum_facilities:
            driver.save()
            told = "; ".join(f"{other}: {reason}" for other, reason in sorted(lost.items()))
            count = f"{len(left)} of {len(driver.rounds)} facilities are left"
            self.stop(f"{count}, minimum_facilities is {self.settings.minimum_facilities}: {told}")
            return []
        reduced = []
        if name in driver.scheduler.members:
            if name in lost:
                self._recall(driver, now, besides=name)
            if name in lost or set(driver.scheduler.active) - {name}:
                reduced = driver.leave(name, now)
        if name not in lost and driver.groups:
            driver.models[name] = driver.groups[-1]["model"]  # it receives first, and then contributes
        driver.save()
        return reduced

    def _recall(self, driver: SemiDecentralised, now: float, besides: str = "") -> None:
        """If only `besides` continues, admit the facilities that will rejoin, so that the final mean waits for them."""
        if set(driver.scheduler.active) - {besides}:
            return
        lost = self.lost(driver)
        for name in driver.rounds:
            if name not in driver.scheduler.members and name not in lost:
                driver.join(name, now, returning=False)

    def stop(self, reason: str) -> None:
        """End every chain; the report step fails with the reason."""
        if not self.archive.read_note("stopped"):
            self.archive.write_note("stopped", {"reason": reason})

    # -- progress of a chain ------------------------------------------------------------------------------------------
    def lost(self, driver: SemiDecentralised) -> dict[str, str]:
        """Facilities whose failures in their round and this run exceed `retries` or `come_backs`, with the reason."""
        result = {}
        for name, round in driver.rounds.items():
            mine = [f for f in driver.failures if (f["facility"], f["round"], f["run"]) == (name, round, driver.runs)]
            again = sum(failure["again"] for failure in mine)
            if len(mine) - again > self.settings.retries or again > self.settings.come_backs:
                result[name] = f"round {round}, attempt {len(mine)}: {mine[-1]['reason']}"
        return result

    def finished(self, driver: SemiDecentralised, facility: str) -> bool:
        return facility in driver.scheduler.members and facility not in driver.scheduler.active

    def next(self, driver: SemiDecentralised, facility: str) -> Next | None:
        """How the facility's chain goes on; None: it waits for its group, or has its last round to finish."""
        model, number = Path(driver.models[facility]), driver.rounds[facility]

        def ended(why: str) -> Next:
            return Next(model=model, round=number, proceed=False, why=why)

        if note := self.archive.read_note("stopped"):
            return ended(f"the federation stopped: {note['reason']}")
        if reason := self.lost(driver).get(facility):
            return ended(f"the others go on without it: {reason}")
        if driver.final or self.finished(driver, facility):
            return ended(f"all {number} rounds are done")
        if facility in driver.scheduler.waiting or number >= self.settings.rounds:
            return None
        return Next(model=model, round=number, proceed=True, why=f"round {number} from {model.name}")

    def look(self, facility: str) -> list[Reduced]:
        """While a facility waits: close the groups whose window has passed, finish it after its last round."""
        driver = self.driver()
        due = driver.scheduler.wake is not None and time.time() >= driver.scheduler.wake
        if not (due or self._at_its_end(driver, facility)):
            return []
        with self.alone() as (driver, now):
            reduced = driver.tick(now)
            if self._at_its_end(driver, facility):
                self._recall(driver, now, besides=facility)
                reduced += driver.finish(facility, now)
            self._prune(driver)
            return reduced

    def _at_its_end(self, driver: SemiDecentralised, facility: str) -> bool:
        """Has its last update been averaged, and the facility not yet said that it was the last?"""
        waits = facility in driver.scheduler.waiting
        return driver.rounds[facility] >= self.settings.rounds and not (waits or driver.final)

    def _prune(self, driver: SemiDecentralised) -> None:
        """Remove means that no facility trains from, except the last `keep_rounds`, and updates that were replaced."""
        needed = {Path(path).name for path in [*driver.models.values(), driver.final] if path}
        if keep := self.settings.keep_rounds:
            needed |= {Path(group["model"]).name for group in driver.groups[-keep:]}
            for path in self.place.glob("group-*"):
                if path.is_dir() and path.name not in needed:
                    shutil.rmtree(path, ignore_errors=True)
        updates = {Path(path).parent.name for path in driver.updates.values()}
        for path in (self.place / "updates").glob("*-*"):
            if path.name not in updates:
                shutil.rmtree(path, ignore_errors=True)


def meeting_of(archive: Archive, settings: CoordinatorSettings) -> Meeting:
    """Raises `ConfigurationError` where the federation has no groups."""
    if settings.groups is None:
        raise ConfigurationError(f"federation {settings.federation!r} has no groups: render again with `groups:`")
    return Meeting(archive, settings)
