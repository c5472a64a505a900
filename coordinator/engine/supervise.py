"""Keep `streamflow run` going to its end: notice when it hangs, start it again, and leave no job behind.

StreamFlow leaves its jobs in the queues when it stops, and some failures make it hang. The archive makes starting again
cheap: the workflow goes on after the last complete round, and facilities that are done answer at once. A job that still
runs is waited for by the Slurm connector of `coordinator.streamflow_plugin`; one that waits in a queue is cancelled
first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from coordinator.engine.engine_log import how_engine_ended, last_error
from coordinator.engine.open_files import out_of_files
from coordinator.engine.queues import TICK_SECONDS, Answers, Queue, asked_meanwhile
from coordinator.engine.stuck_jobs import Watch
from coordinator.events.event import Event
from coordinator.events.follow import EventFile
from coordinator.schedulers.scheduler import Job
from coordinator.streamflow_plugin.names import STEP_SERVER
from coordinator.streamflow_plugin.openssh import known_as, shown_owner
from facility.exchange.child import end_with_parent
from facility.exchange.exit_codes import ExitCode
from facility.exchange.files.storage import SAME_COMMAND
from facility.exchange.text import number_of

log = logging.getLogger("coordinator.engine")

LEFT = "; a job of ours may go on there, which the next run waits for or cancels"
"""What follows of a facility that does not answer at the end."""
PAUSE_TURN_SECONDS = 0.2
"""How often a pause between attempts lets the display go on and looks whether the run is to stop."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to step in."""

    silence_seconds: float = 900.0
    """No line in StreamFlow's log for so long, and no job of ours at work anywhere: it hangs."""
    restarts: int = 5
    """Starts again without a new complete round in between; then a person is needed."""
    pause_seconds: float = 10.0
    """Before the first start again; doubles each time up to five minutes."""
    stop_seconds: float = 30.0
    """How long StreamFlow may take to stop before it is killed."""
    look_seconds: float = 60.0
    """How often the queues are looked at for jobs that will not begin by themselves."""
    probe_seconds: float = 5.0
    """How often a file is written where the run must be able to write."""
    refused_seconds: float = 15.0
    """While that fails: how long StreamFlow may be silent with no job at work."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How one run of StreamFlow ended."""

    code: int
    new_rounds: int
    """Rounds completed during this attempt."""
    hung: bool = False
    fatal: str = ""
    """What trying again cannot fix."""
    failed: str = ""
    """Step of the coordinator that failed, and why."""
    error: str = ""
    """With which StreamFlow's log ends."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What happens next, and why."""

    next: Literal["done", "again", "give up"]
    reason: str
    pause_seconds: float = 0.0


def decide(attempts: Sequence[Attempt], limits: Limits) -> Decision:
    """What to do after the last of `attempts`."""
    last = attempts[-1]
    if last.fatal:
        return Decision(next="give up", reason=last.fatal)
    if last.code == 0 and not last.hung:
        return Decision(next="done", reason="StreamFlow ended well")
    fruitless = 0
    for attempt in reversed(attempts):
        if attempt.new_rounds:
            break
        fruitless += 1
    what = last.failed or ("StreamFlow hung" if last.hung else how_engine_ended(last.code, last.error))
    if fruitless > limits.restarts:
        return Decision(next="give up", reason=f"{what}; {number_of(fruitless, 'start')} brought no new complete round")
    pause = min(300.0, limits.pause_seconds * 2 ** max(0, fruitless - 1))
    return Decision(next="again", reason=what, pause_seconds=pause)


def fatal_reason(event: Event) -> str:
    """A sentence when an event reports something that only an operator can fix, else ''."""
    if event.kind == "host_key":
        host, owner = event["host"], event["owner"] or known_as(event["host"])
        return (
            f"the host key of {shown_owner(host, owner)} is not one that known_hosts has for it ({event['reason']}). "
            "Where it has none, log in by hand and compare the key with the published one; if the facility announced a "
            f"new key, first `ssh-keygen -R '{owner}'`; otherwise ask its staff: someone may be listening in between"
        )
    if event.kind == "failed" and (event["futile"] or event["step"].strip("/") == "start"):
        return f"{event['step'].strip('/')}: {event['reason']}"
    return ""


@dataclass(kw_only=True)
class _Watched:
    """State of the attempt under way."""

    now: dataclasses.InitVar[float]
    heard: float = 0.0
    """When StreamFlow last said anything."""
    killed_at: float | None = None
    fatal: str = ""
    failed: str = ""
    error: str = ""
    hung: bool = False
    probed: float = 0.0
    """When the run's directories were last tried."""
    refused: str = ""
    """A sentence on one that takes no file; empty: all do."""
    refused_at: float = 0.0
    """Since when."""

    def __post_init__(self, now: float) -> None:
        self.heard = now


@dataclass(kw_only=True)
class Supervisor:
    """Runs one command to its end despite hangs and failures. `run` blocks; a signal handler may call `stop`."""

    command: Callable[[], list[str]]
    """Makes the command line anew for every start (each run of StreamFlow wants a name of its own)."""
    directory: Path
    environment: dict[str, str]
    queues: list[Queue]
    on_line: Callable[[str], None]
    """Gets every log line, without its end."""
    events: EventFile | None = None
    """Events of the run's steps and connectors."""
    on_event: Callable[[Event], object] = lambda event: None
    """Gets every event."""
    on_tick: Callable[[], object] = lambda: None
    """Called about twice a second while StreamFlow runs, and while queues are asked."""
    on_again: Callable[[], object] = lambda: None
    """Called where StreamFlow is started again after a pause."""
    on_stuck: Callable[[str, str, str, str], None] = lambda facility, job, reason, advice: None
    """Gets facility, job, reason and advice of each job that will not begin by itself, once."""
    on_away: Callable[[str, str], object] = lambda facility, sentence: None
    """Gets a facility whose login node does not answer and a sentence on it, each time that it is asked in vain."""
    on_back: Callable[[str], object] = lambda facility: None
    """Gets a facility that answers, each time that it is asked."""
    rounds_done: Callable[[], int]
    """Complete rounds in the archive."""
    unwritable: Callable[[], str] = str
    """A sentence on a directory of the run that takes no file, or ''."""
    stopped: Callable[[], str] = str
    """Why the coordinator itself ended the federation and an operator is needed, or ''; also what prevents any
    further start, such as a full disk."""
    limits: Limits = field(default_factory=Limits)
    pass_fds: tuple[int, ...] = ()
    attempts: list[Attempt] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None
    _stopped: int = 0

    def run(self) -> tuple[int, str]:
        """Exit code and reason: 0, 2 where a person has to change something first, StreamFlow's own last code (1: we
        ended it), or 128 + the signal given to `stop`."""
        watch = Watch(
            queues=self.queues,
            stuck=self.on_stuck,
            away=self.on_away,
            back=self.on_back,
            every_seconds=self.limits.look_seconds,
        )
        with watch.going_on():
            return self._run()

    def _run(self) -> tuple[int, str]:
        while True:
            self._clear_waiting()
            if self._stopped:
                return self._end(128 + self._stopped, "stopped")
            self.attempts.append(self._attempt())
            if self._stopped:
                return self._end(128 + self._stopped, "stopped")
            decision = decide(self.attempts, self.limits)
            if decision.next == "done":
                return self._end(0, decision.reason, [one for one in self.queues if one.ahead])
            if decision.next == "give up":
                last = self.attempts[-1]
                return self._end(ExitCode.INPUT if last.fatal else max(1, last.code), decision.reason)  # < 0: by us
            log.warning("%s; starting again in %g s", decision.reason, decision.pause_seconds)
            self.on_again()
            deadline = time.monotonic() + decision.pause_seconds
            while time.monotonic() < deadline and not self._stopped:
                self.on_tick()
                time.sleep(PAUSE_TURN_SECONDS)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Stop StreamFlow and do not start it again; `run` then cancels our jobs and returns."""
        self._stopped = int(number)
        self._signal(number)

    def _attempt(self) -> Attempt:
        before = self.rounds_done()
        process = self._process = subprocess.Popen(
            self.command(),
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=self.pass_fds,
            preexec_fn=end_with_parent(signal.SIGTERM),  # StreamFlow ends with this command
        )
        if self._stopped:  # the signal came while the process was being made
            self._signal(self._stopped)
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        watched = _Watched(now=time.monotonic())
        try:
            while True:
                try:
                    line = lines.get(timeout=TICK_SECONDS)
                except queue.Empty:
                    line = ""
                self._hear_events(watched)
                self.on_tick()
                if line is None:
                    break
                if line:
                    watched.heard = time.monotonic()
                    self.on_line(line.rstrip("\n"))
                    watched.failed = watched.failed or out_of_files(line)
                    watched.error = last_error(line, watched.error)
                self._probe(watched)
                self._step_in(process, watched)
            code = process.wait()
        finally:
            if process.poll() is None:
                self._signal(signal.SIGKILL)
                process.wait()
            self._process = None
        self._hear_events(watched)
        fatal = watched.fatal or (self.stopped() if code else "")
        if watched.failed and not fatal and self.attempts and self.attempts[-1].failed == watched.failed:
            fatal = f"{watched.failed} (twice in a row)"
        done = self.rounds_done() - before
        return Attempt(
            code=code, new_rounds=done, hung=watched.hung, fatal=fatal, failed=watched.failed, error=watched.error
        )

    def _hear_events(self, watched: _Watched) -> None:
        """Hand on what happened; remember what must end this attempt."""
        for event in self.events.new() if self.events is not None else ():
            watched.heard = time.monotonic()
            self.on_event(event)
            if not watched.fatal:
                watched.fatal = fatal_reason(event)
            if event.kind == "failed" and not watched.failed:
                watched.failed = f"{event['step'].strip('/')}: {event['reason']}"

    def _probe(self, watched: _Watched) -> None:
        """Report a directory that takes no file once, and once that it does again."""
        now = time.monotonic()
        if now - watched.probed < self.limits.probe_seconds:
            return
        watched.probed, refused = now, self.unwritable()
        if refused and refused != watched.refused:
            log.warning("%s; nothing is lost, jobs at work go on", refused.removesuffix(SAME_COMMAND))
            watched.refused_at = now
        elif watched.refused and not refused:
            log.info("files can be written again")
        watched.refused = refused

    def _step_in(self, process: subprocess.Popen[str], watched: _Watched) -> None:
        """Stop StreamFlow when it cannot go on or hangs, and kill it when it does not stop."""
        now = time.monotonic()
        if watched.killed_at is None:
            if watched.fatal or watched.failed:  # StreamFlow itself may hang after a step failed
                log.error(watched.fatal or watched.failed)
                self._signal(signal.SIGTERM)
                watched.killed_at = now
            elif self._stopped:
                log.info("stopping; what waits or runs at the facilities is cancelled then")
                watched.killed_at = now
            elif watched.refused and now - max(watched.heard, watched.refused_at) > self.limits.refused_seconds:
                if self._at_work(process):
                    watched.heard = now
                else:
                    watched.fatal = watched.refused
            elif now - watched.heard > self.limits.silence_seconds:
                if self._at_work(process):
                    watched.heard = now
                else:
                    watched.hung, watched.killed_at = True, now
                    silent = self.limits.silence_seconds
                    log.error("no progress for %g s and no job at work: StreamFlow hangs", silent)
                    self._signal(signal.SIGTERM)
        elif now - watched.killed_at > self.limits.stop_seconds:
            self._signal(signal.SIGKILL)

    def _at_work(self, process: subprocess.Popen[str]) -> bool:
        """True if a job of ours is queued or running, locally or remotely; a silent facility counts as busy."""
        if children(process.pid):
            return True
        found = self._asked(lambda one: one.jobs(), "jobs are being looked for")
        return bool(found.silent) or any(found.jobs.values())

    def _clear_waiting(self) -> None:
        """Before a start: cancel jobs of an earlier run that still wait; report those that run.

        One that is ahead of its model keeps its place: the connector gives it its round.
        """
        self._asked(lambda one: one.cancel(waiting_only=True, ahead=False), "jobs that wait are being cancelled")

    def _end(self, code: int, reason: str, queues: list[Queue] | None = None) -> tuple[int, str]:
        """Cancel and report this federation's jobs in the queues; in all of them unless some are named."""

        def cancel(one: Queue) -> list[Job]:
            gone = one.cancel()
            for job in gone:
                log.info("cancelled job %s (%s) at %s", job.id, job.state, one.facility)
            return gone

        self._asked(cancel, "jobs are being cancelled", queues, silent=LEFT)
        return code, reason

    def _asked(
        self, act: Callable[[Queue], list[Job]], doing: str, queues: list[Queue] | None = None, *, silent: str = ""
    ) -> Answers:
        """What all queues answer, or those named. `silent`: what follows of one that does not."""
        asked = self.queues if queues is None else queues
        found = asked_meanwhile(asked, act, doing, self.on_tick)
        if silent:
            found.log_silent(silent)
        else:
            found.report_away(asked, self.on_away, self.on_back)
            found.log_silent(but=found.away.values())
        return found

    def _signal(self, number: int) -> None:
        """Send a signal to StreamFlow and to every local job it started."""
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def children(pid: int) -> list[int]:
    """Live processes below `pid` that do work: StreamFlow's jobs on this machine, neither the shells it keeps
    open nor what steps are forked from."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for task in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = task.read_text(encoding="utf-8", errors="replace").partition("(")[2].rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        if fields[0] not in "ZX":
            parents.setdefault(int(fields[1]), []).append((int(task.parent.name), name))
    found, reached = [], [pid]
    while reached:
        for child, name in parents.get(reached.pop(), []):
            reached.append(child)
            if name not in ("sh", "bash", "dash", STEP_SERVER):
                found.append(child)
    return found


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):
        for line in process.stdout:
            lines.put(line)
    lines.put(None)
