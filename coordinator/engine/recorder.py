"""What a run's events leave behind: lines of the archive's `events.jsonl`, the live snapshot, notifications."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from coordinator.archive.journal import Journal
from coordinator.archive.rounds import Archive, RoundFile
from coordinator.durations import format_duration
from coordinator.engine.expected_end import LATEST, expected_end
from coordinator.engine.live import FacilityState, Snapshot, write_snapshot
from coordinator.engine.notify import Notifier
from coordinator.engine.progress import Progress
from coordinator.engine.queues import facility_of
from coordinator.engine.run_process import this_process
from coordinator.events.event import Event
from facility.exchange.errors import CrossFedError

SILENT_SECONDS = 1800.0
"""A training job without a sign of life for so long is reported."""
RENEW_SECONDS = 2.0
"""Time between two snapshots."""
DIRECTORIES = ("model", "sent", "update")
"""Transfers worth a line; settings and the like are not."""


class Recorder:
    """Hears every event after `Progress` has taken it."""

    def __init__(
        self,
        *,
        federation: str,
        progress: Progress,
        journal: Journal,
        notifier: Notifier,
        workdir: Path,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.federation, self.progress, self.journal, self.notifier = federation, progress, journal, notifier
        self.workdir, self.clock = workdir, clock
        self._stages: dict[str, str] = {}
        self._written = 0.0
        self._last: list[RoundFile] = []
        self._complete = 0
        self._round_begun = clock()

    def hear(self, event: Event) -> None:
        """Record one event."""
        if (record := getattr(self, f"_on_{event.kind}", None)) is not None:
            record(event)

    def begin(self, rounds: int, limits: Mapping[str, float]) -> None:
        """A run goes on from `rounds` complete rounds; `limits`: seconds that a job may take, by facility."""
        self.journal.append("run_started", time=self.clock(), rounds=rounds, limits=dict(limits))

    def end(self, code: int, reason: str, *, done: bool) -> None:
        """The run is over; `done`: the whole federation is."""
        self.journal.append("run_ended", time=self.clock(), code=code, reason=reason)
        if done:
            self.notifier.notify("done", f"federation {self.federation} is done", once="end")
        elif code:
            self.notifier.notify("stopped", f"federation {self.federation} stopped: {reason}", once="end")
        self.write(ended=reason or "done")

    def stuck(self, facility: str, job: str, reason: str, advice: str) -> None:
        """A job that will not begin by itself."""
        self.journal.append("stuck", time=self.clock(), facility=facility, job=job, reason=reason, advice=advice)
        text = f"{facility}: job {job} will not begin by itself ({reason}): {advice}"
        self.notifier.notify("stuck", text, facility=facility, once=f"{job} {reason}")

    def expiring(self, facility: str, sentence: str) -> None:
        """A certificate that ends soon or has ended."""
        self.notifier.notify("login", sentence, facility=facility, once=sentence)

    def tick(self) -> None:
        """Renew the snapshot, and look for jobs that have gone silent."""
        now = self.clock()
        if 0 <= now - self._written < RENEW_SECONDS:  # less: the clock was set back
            return
        for name, one in self.progress.live.items():
            if one.stage not in ("", "waiting") and one.heard and now - one.heard > SILENT_SECONDS:
                text = f"{name}: no sign of life from its job for {format_duration(now - one.heard)}"
                self.notifier.notify("stuck", text, facility=name, once=f"silent {one.heard}")
        self.write()

    def write(self, ended: str = "") -> None:
        """Leave the snapshot for `crossfed status --follow`."""
        self._written = self.clock()
        with suppress(OSError):  # a disk that is full stops no federation
            write_snapshot(self.workdir, self.snapshot(ended))

    def snapshot(self, ended: str = "") -> Snapshot:
        """The run, now."""
        progress = self.progress
        left = progress.rounds - self._complete
        round_end, rounds_after = expected_end(self._last, left=left, begun=self._round_begun)
        return Snapshot(
            federation=self.federation,
            heading=progress.heading,
            coordinator=progress.step,
            time=self.clock(),
            unit=progress.unit(),
            round_end=round_end,
            rounds_after=rounds_after,
            ended=ended,
            process=this_process(),
            facilities={name: progress.live.get(name, FacilityState()) for name in progress.facilities},
        )

    def _append(self, kind: str, event: Event, facility: str = "", **detail) -> None:
        number = event.fields.get("round")
        number = self.progress.round if number is None else int(number)
        self.journal.append(kind, time=event.time or self.clock(), facility=facility, round=number, **detail)

    def _next_round(self, event: Event) -> None:
        """The rounds that are complete say how long the next one will take."""
        self._round_begun = event.time or self.clock()
        with suppress(CrossFedError, OSError):
            archive = Archive(self.journal.path.parent)
            numbers = archive.rounds()
            self._complete, self._last = len(numbers), [archive.read_round(one) for one in numbers[-LATEST:]]

    def _on_starting(self, event: Event) -> None:
        self._next_round(event)
        self._append("round_started", event)

    def _on_executing(self, event: Event) -> None:
        if str(event["step"]).rpartition("/")[2] == "aggregate":
            self._append("averaging", event)

    def _on_submitted(self, event: Event) -> None:
        if name := self._whose(event):
            self._append("queued", event, name, job=event["job"])

    def _on_ahead(self, event: Event) -> None:
        if name := self._whose(event):
            self._append("ahead", event, name, job=event["job"])

    def _on_waited(self, event: Event) -> None:
        detail = {key: event[key] for key in ("job", "seconds", "nodes", "handed")}
        until, name = float(event["until"]), str(event["facility"])
        self.journal.append("waited", time=until, facility=name, round=self.progress.round, **detail)

    def _on_began(self, event: Event) -> None:
        if name := self._whose(event):
            self._append("started", event, name, **({"job": event["job"]} if event["job"] else {}))

    def _on_requeued(self, event: Event) -> None:
        if name := self._whose(event):
            self._stages.pop(name, None)
            self._append("requeued", event, name, job=event["job"])

    def _on_progress(self, event: Event) -> None:
        name = self._whose(event)
        if name and self._stages.get(name) != event["stage"]:
            self._stages[name] = event["stage"]
            self._append("stage", event, name, stage=event["stage"])

    def _on_ended(self, event: Event) -> None:
        if name := self._whose(event):
            self._stages.pop(name, None)
            said = {"problem": event["problem"]} if event["problem"] else {}
            self._append("trained", event, name, code=event["code"], **said)

    def _on_moved(self, event: Event) -> None:
        if event["what"] in DIRECTORIES:
            kind = "sent" if event["way"] == "to" else "transferred"
            figures = {key: event[key] for key in ("what", "bytes", "seconds")}
            self._append(kind, event, str(event["facility"]), **figures)

    def _on_received(self, event: Event) -> None:
        self._append("verified", event, event["facility"])

    def _on_refused(self, event: Event) -> None:
        name, reason = str(event["facility"]), str(event["reason"])
        self._append("refused", event, name, reason=reason)
        text = f"round {event['round']} is without {name}: {reason}"
        self.notifier.notify("lost", text, facility=name, round=event["round"])

    def _on_late(self, event: Event) -> None:
        self._append("late", event, event["facility"], reason=event["reason"])

    def _on_log(self, event: Event) -> None:
        self._append("log", event, event["facility"], lines=event["lines"])

    def _on_complete(self, event: Event) -> None:
        self._append("averaged", event, decision=event["decision"])
        self._next_round(event)

    def _on_compared(self, event: Event) -> None:
        self._append("compared", event, text=event["text"])

    def _on_again(self, event: Event) -> None:
        self._append("repeated", event, reason=event["reason"])

    def _on_login_refused(self, event: Event) -> None:
        name = str(event["facility"])
        self._append("login_refused", event, name, reason=event["reason"])
        text = f"{name} refuses the login ({event['reason']}): `crossfed login {name}`"
        self.notifier.notify("login", text, facility=name, once="refused")

    def _on_login_works(self, event: Event) -> None:
        name = str(event["facility"])
        self._append("login_works", event, name)
        self.notifier.forget("login", name)

    def _on_away(self, event: Event) -> None:
        self._append("problem", event, text=self.progress.words_of_away(event))

    def _on_back(self, event: Event) -> None:
        name = str(event["facility"])
        self._append("problem", event, text=self.progress.words_of_back(name))

    def _on_problem(self, event: Event) -> None:
        self._append("problem", event, text=event["text"])

    def _whose(self, event: Event) -> str:
        name = facility_of(str(event["step"]))
        return name if name in self.progress.facilities else ""
