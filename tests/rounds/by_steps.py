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
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from coordinator.config.federation import Federation, read_federation
from coordinator.engine.render import write
from coordinator.steps import aggregate, receive, report, send, start
from facility import round as facility_round
from facility.exchange.errors import exit_on_error
from facility.exchange.files.durable import write_json
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
    said: list[str] = field(default_factory=list)
    """What steps and jobs printed."""

    def __post_init__(self) -> None:
        self.federation: Federation = read_federation(self.file)
        self.root = self.file.parent.parent

    def run(self) -> str:
        """All rounds and the report; why the federation stopped, or nothing. Raises `Refused`."""
        with contextlib.redirect_stderr(io.StringIO()):
            write(self.federation)
        model = self.federation.path(self.federation.model)
        following = self.values(start.main, "start", "--model", model)
        for number in range(MOST_ROUNDS):
            if not following["proceed"]:
                break
            following = self.round(number, int(following["round"]), Path(following["model"]["path"]))
        else:
            raise AssertionError(f"it goes round for ever: {self.said[-1]}")
        code, text = self.step(report.main, "report", "--out", "summary.json", expect=(0, 1))
        assert (self.federation.archive_path / "report.html").is_file(), text
        return text if code else ""

    def round(self, place: int, number: int, model: Path) -> dict[str, Any]:
        """One round of the workflow; what it hands on to the next."""
        received = []
        here = ("--model", model, "--round", number)
        for facility in self.federation.facilities:
            name, folder = facility.name, f"{place}-{facility.name}"
            options: list[object] = ["--facility", name, *here]
            sent = model
            if self.federation.sending.encoding != "full":
                self.step(send.main, f"{folder}/send", *options, "--out", "sent")
                sent = self.root / "steps" / folder / "send" / "sent"
            if (number, name) not in self.absent:
                options += ["--update", self.train(folder, name, sent, number)]
            self.step(receive.main, f"{folder}/receive", *options, "--out", "update")
            received.append(self.root / "steps" / folder / "receive" / "update")
        return self.values(aggregate.main, f"{place}-aggregate", *here, "--updates", *received)

    def train(self, folder: str, name: str, model: Path, number: int) -> Path:
        """Jobs of one facility until its round has ended; its update. Raises `Refused`."""
        facility = next(one for one in self.federation.facilities if one.name == name)
        settings = self.file.parent / "facilities" / f"{name}.json"
        job = self.root / "jobs" / folder
        asked = ("--model", model, "--dataset", self.federation.path(facility.dataset), "--settings", settings)
        more = ("--round", number, "--out", "update", "--state", self.root / "state" / name)
        for stop in range(1, MOST_JOBS):
            stop_after(settings, stop)
            code, text = called(facility_round.main, job, *asked, *more)
            self.said.append(text)
            if code == 0:
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
        files = sorted(self.federation.archive_path.rglob("*.safetensors"))
        return {
            str(file.relative_to(self.federation.archive_path)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in files
        }


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
