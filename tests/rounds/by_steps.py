"""A federation's steps in the order in which the workflow runs them, each by its own `main`, in this process.

No engine, no copies, no queue: a round of a pico model takes a second or two, and trainers are forks
(`tests.forked_trainers`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from coordinator.config.federation import Federation, read_federation
from coordinator.engine.render import write_rendered
from coordinator.steps import aggregate, aggregate_masked, receive, report, roster, send, start, survivors
from facility import keys, unmask
from facility import round as facility_round
from facility.exchange.errors import exit_on_error
from facility.exchange.files.durable import write_json
from facility.exchange.masking.unmasking import REQUEST
from facility.exchange.messages.outcome import Outcome
from tests import forked_trainers

MOST_ROUNDS = 12
"""More than any federation here has: it goes round for ever."""
MOST_JOBS = 12
"""Of a facility and a round that is paused again and again."""


class Refused(Exception):
    """A step or a job of the federation refuses it, in these words."""


@dataclass(kw_only=True)
class BySteps:
    """One federation, from its federation.yml."""

    file: Path
    absent: Collection[tuple[int, str]] = ()
    """Round and name of facilities that leave no update."""
    late: Mapping[tuple[int, str], int] = field(default_factory=dict)
    """By how many rounds an update comes after its own, by round and name."""
    at_work: dict[str, tuple[int, Path]] = field(default_factory=dict)
    """Updates that are late, with the round that they come in."""
    twice: bool = False
    """Whether every step and every job that ended well is run again, as an engine does that lost what it gave."""
    said: list[str] = field(default_factory=list)
    """What steps and jobs printed."""

    def __post_init__(self) -> None:
        self.federation: Federation = read_federation(self.file)
        self.root = self.file.parent.parent

    def run(self) -> str:
        """All rounds and the report; why the federation stopped, or nothing. Raises `Refused`."""
        with contextlib.redirect_stderr(io.StringIO()):
            write_rendered(self.federation)
        following = self.started()
        for number in range(MOST_ROUNDS):
            if self.edited():
                following = self.started()
            if not following["proceed"]:
                break
            following = self.round(number, int(following["round"]), Path(following["model"]["path"]))
            if self.twice:
                started = self.started()
                assert all(following[key] == started[key] for key in ("round", "proceed")), (following, started)
                handed = [digests_in(Path(one["model"]["path"])) for one in (following, started)]
                assert handed[0] == handed[1] or not started["proceed"], (following, started, handed)
                following = started
        else:
            raise AssertionError(f"it goes round for ever: {self.said[-1]}")
        code, text = self.step(report.main, "report", "--out", "summary.json", expect=(0, 1))
        assert (self.federation.archive_path / "report.html").is_file(), text
        return text if code else ""

    def edited(self) -> bool:
        """Whether a person edits federation.yml now, after which the run is begun anew."""
        return False

    def started(self) -> dict[str, Any]:
        """Where a run begins, or goes on."""
        return self.values(start.main, "start", "--model", self.federation.path(self.federation.model))

    def round(self, place: int, number: int, model: Path) -> dict[str, Any]:
        """One round of the workflow; what it hands on to the next."""
        here = ("--model", model, "--round", number)
        if self.federation.masks is None:
            received = [self.trained(place, name, number, model) for name in self.federation.names]
            return self.values(aggregate.main, f"{place}-aggregate", *here, "--updates", *received)
        drawn = [self.at_login(keys, place, name, number) for name in self.there("keys", number)]
        roster_at = self.made(roster.main, place, "roster", *here, "--keys", *drawn)
        held = ("--roster", roster_at)
        received = [self.trained(place, name, number, model, *held) for name in self.federation.names]
        request = self.made(survivors.main, place, "request", *here, *held, "--updates", *received)
        asked = json.loads((request / REQUEST).read_text())["survivors"]
        answering = self.there("unmask", number) if asked else []
        answers = [self.at_login(unmask, place, name, number, "--request", request) for name in answering]
        more = ("--updates", *received, "--request", request, "--answers", *answers)
        return self.values(aggregate_masked.main, f"{place}-aggregate", *here, *more)

    def there(self, phase: str, number: int) -> list[str]:
        """Facilities that do not miss a phase of the round: keys, train or unmask."""
        names = self.federation.names
        if number >= self.federation.rounds:
            return [] if phase != "train" else list(names)
        return [name for name in names if phase not in self.missed(number, name)]

    def missed(self, number: int, name: str) -> Collection[str]:
        """The phases of a round that a facility misses: from some phase on, all."""
        phases = ("keys", "train", "unmask") if self.federation.masks is not None else ("train",)
        return phases[(number + ord(name[0])) % len(phases) :] if (number, name) in self.absent else ()

    def trained(self, place: int, name: str, number: int, model: Path, *more: object) -> Path:
        """What the coordinator has of a facility after its training: an update, or why there is none."""
        folder = f"{place}-{name}"
        options: list[object] = ["--facility", name, "--model", model, "--round", number]
        if number >= self.federation.rounds:
            self.at_work.pop(name, None)
        if name not in self.at_work and "train" not in self.missed(number, name):
            sent = model
            if self.federation.sending.encoding != "full":
                sent = self.made(send.main, folder, "sent", *options)
            due = number + self.late.get((number, name), 0)
            self.at_work[name] = due, self.train(folder, name, sent, number, *more)
        if name in self.at_work and self.at_work[name][0] <= number:
            options += ["--update", self.at_work.pop(name)[1]]
        return self.made(receive.main, folder, "update", *options)

    def made(self, main: Callable[[], int], folder: object, out: str, *arguments: object) -> Path:
        """The directory that a step makes."""
        self.step(main, f"{folder}/{out}", *arguments, "--out", out)
        return self.root / "steps" / str(folder) / out / out

    def asked(self, name: str, number: int) -> tuple[object, ...]:
        """What every command of a facility is given."""
        facility = next(one for one in self.federation.facilities if one.name == name)
        settings = self.file.parent / "facilities" / f"{name}.json"
        return (
            *("--dataset", self.federation.path(facility.dataset), "--settings", settings),
            *("--round", number, "--out", "update", "--state", self.root / "state" / name),
        )

    def at_login(self, command: ModuleType, place: int, name: str, number: int, *more: object) -> Path:
        """What a command on a facility's login node makes. Raises `Refused`."""
        job = self.root / "jobs" / f"{place}-{name}" / command.__name__
        code, text = called(command.main, job, *self.asked(name, number), *more)
        self.said.append(text)
        if code:
            raise Refused(text)
        return job / "update"

    def train(self, folder: str, name: str, model: Path, number: int, *more: object) -> Path:
        """Jobs of one facility until its round has ended; its update. Raises `Refused`."""
        job = self.root / "jobs" / folder / "train"
        asked = ("--model", model, *self.asked(name, number), *more)
        for stop in range(1, MOST_JOBS):
            stop_after(self.file.parent / "facilities" / f"{name}.json", stop)
            code, text = called(facility_round.main, job, *asked)
            self.said.append(text)
            if code == 0:
                if self.twice:
                    first = digests_in(job / "update")
                    code, text = called(facility_round.main, job, *asked)
                    further = number >= self.federation.rounds  # one more round of training alone
                    assert not code and (further or digests_in(job / "update") == first), f"{job} again: {code} {text}"
                return job / "update"
            failure = json.loads((job / "update" / "failure.json").read_text())
            assert code == Outcome.SKIPPED, text
            if not failure["again"]:
                raise Refused(failure["reason"])
        raise AssertionError(f"{name} trains round {number} for ever: {text}")

    def step(
        self, main: Callable[[], int], folder: str, *arguments: object, expect: Collection[int] = (0,)
    ) -> tuple[int, str]:
        """One of the coordinator's steps, in a folder of its own."""
        both = ("--federation", self.file.parent / "coordinator.json", "--archive", self.federation.archive_path)
        code, text = called(main, self.root / "steps" / folder, *both, *arguments)
        self.said.append(text)
        if self.twice and not code and main in (send.main, receive.main):
            first = digests_in(self.root / "steps" / folder)
            code, text = called(main, self.root / "steps" / folder, *both, *arguments)
            self.said.append(text)
            assert digests_in(self.root / "steps" / folder) == first, f"{folder} run again: {text}"
        if code not in expect or "Traceback" in text or "cannot be closed" in text:
            raise AssertionError(f"{folder} ended with {code}:\n{text}")
        if "goes on without" in text and "left no update" not in text:
            raise Refused(text)
        return code, text

    def values(self, main: Callable[[], int], folder: str, *arguments: object) -> dict[str, Any]:
        """What a step hands on."""
        self.step(main, folder, *arguments)
        found: dict[str, Any] = json.loads((self.root / "steps" / folder / "cwl.output.json").read_text())
        return found

    def digests(self) -> dict[str, str]:
        """Of every file of tensors in the archive."""
        return digests_in(self.federation.archive_path)


def digests_in(directory: Path) -> dict[str, str]:
    """Of every file of tensors in a directory."""
    files = sorted(directory.rglob("*.safetensors"))
    return {str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def stop_after(settings: Path, steps: int) -> None:
    """Let the next job of a facility whose rounds are interrupted stop so many steps into its round."""
    values = json.loads(settings.read_text())
    if values["training"].get("limits", {}).get("stop_after"):
        values["training"]["limits"]["stop_after"] = steps
        write_json(settings, values)


def called(main: Callable[..., int], folder: Path, *arguments: object) -> tuple[int, str]:
    """Exit code of a command in an empty folder, and what it printed; this process is as before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        with (
            mock.patch.object(sys, "argv", ["step", *map(str, arguments)]),
            mock.patch.dict(os.environ, forked_trainers.variables()),
            contextlib.chdir(folder),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            try:
                code = int(exit_on_error(main))
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code, said.buffer.getvalue().decode(errors="replace")  # type: ignore[attr-defined]
