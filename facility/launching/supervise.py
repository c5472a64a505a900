"""Runs ranks; on the first failure terminates the rest and reports that failure.

A rank that has reported (`replica_notes`) that the others can do without its replica ends that replica alone: its other
ranks are ended too, and the run fails only if no replica finishes.
"""

from __future__ import annotations

import logging
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from facility.exchange.child import end_with_parent
from facility.exchange.errors import ERROR, error_line
from facility.exchange.exit_codes import ExitCode, name_of_signal
from facility.exchange.messages.outcome import ENDING, Outcome
from facility.exchange.messages.report import output_leaves
from facility.launching.replica_notes import ReplicaNote, forget_note, read_note

log = logging.getLogger("facility.launch")

TAIL_LINES = 60
INPUT, TRANSIENT = int(ExitCode.INPUT), int(ExitCode.TRANSIENT)
FOR_ALL = (Outcome.DONE, Outcome.SKIPPED, Outcome.CHECKPOINTED, INPUT)
"""Codes that say something of the whole round; with any other a replica that can be missed is merely lost."""
AGREED = (Outcome.SKIPPED, Outcome.CHECKPOINTED, INPUT, TRANSIENT)
"""Codes that ranks end with together: when one rank has, the others get the grace period to do so by themselves."""
BY_US = (-signal.SIGTERM, -signal.SIGKILL)
"""Codes of ranks that were ended from outside: by this supervisor, where it had cause to."""
FORWARDED = (signal.SIGINT, *ENDING)
TURN_SECONDS = 0.1
"""How long output is waited for before ends and limits are looked at again."""
ELSEWHERE_SECONDS = 0.5
"""How often to look at what other nodes have noted in the shared directory."""
DRAIN_SECONDS, PAUSE_SECONDS = 1.0, 0.05
"""How long pipes of ended ranks are read at most; a pause as long as the second one is their end."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When ranks are ended; all in seconds, 0: never."""

    grace: float = 10.0
    """From SIGTERM, sent when one of them has failed, to SIGKILL."""
    save: float = 120.0
    """From a SIGTERM or SIGINT that we were sent, and passed on, to SIGKILL."""
    total: float = 0.0
    """How long the whole run may take."""
    silence: float = 0.0
    """Without a word from any rank."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the ranks of this task ended."""

    code: int
    """0, or the code of the rank that failed first; 128 + number for a signal; 124 for a time limit; 75 where one rank
    alone fell (SIGKILL, or an error that the others met as lost contact): the same command may succeed."""
    reason: str
    """One sentence; empty when all ended with 0."""
    tail: str = ""
    """Last lines of that rank's output."""
    time: float = 0.0
    """When it failed, in seconds since 1970."""
    missed: bool = True
    """False where only replicas ended that others, on other nodes, can do without: theirs is the last word."""


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    part: bytes = b""
    traceback_at: float | None = None
    ended_at: float | None = None
    code: int | None = None
    note: ReplicaNote | None = None
    """Its latest, read when it ended."""
    kill_at: float | None = None
    """When it is ended by SIGKILL, for the others go on without it."""

    @property
    def lost(self) -> bool:
        """True if it ended as part of a replica that the others can do without."""
        return self.code not in (None, *FOR_ALL) and self.note is not None and not self.note.finishes


def supervise_ranks(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    limits: Limits,
    out: BinaryIO | None = None,
    elsewhere: Callable[[], str] | None = None,
    directory: Path | None = None,
) -> Ending:
    """Run `command` once for each of `environments` and wait until all have ended.

    Every process leads a session of its own; whatever it leaves behind is killed with it, and it is killed when this
    process dies. SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 are passed on. `elsewhere` is asked every half second whether
    another node failed, and says how. At the latest `limits.grace` + 1 s after the first failure nothing is left.
    `directory`: where ranks leave notes on their replicas; None: every rank needs every other.
    """
    run = _Run(limits=limits, out=out or sys.stdout.buffer, elsewhere=elsewhere, directory=directory)
    handlers = {number: signal.signal(number, run.pass_on) for number in FORWARDED}
    try:
        run.start(command, environments)
        while run.living():
            run.turn()
        run.drain()
        return run.ending()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        run.kill_all()


class _Run:
    def __init__(
        self, *, limits: Limits, out: BinaryIO, elsewhere: Callable[[], str] | None, directory: Path | None
    ) -> None:
        self.limits, self.out, self.elsewhere, self.directory = limits, out, elsewhere, directory
        self.ranks: list[_Rank] = []
        self.selector = selectors.DefaultSelector()
        self.began = self.spoken = self.looked = time.monotonic()
        self.deadline: float | None = None  # when SIGKILL follows
        self.terminate_at: float | None = None  # when SIGTERM follows
        self.cause: tuple[int, str] | None = None  # code and reason that are not a rank's own

    def start(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        for environment in environments:
            number = int(environment.get("RANK", len(self.ranks)))
            forget_note(self.directory, number)
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent(signal.SIGKILL),
            )
            rank = _Rank(number=number, process=process)
            self.ranks.append(rank)
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            self.selector.register(process.stdout, selectors.EVENT_READ, rank)
            if self.cause is not None:  # a signal came while the process was being made
                _signal(rank, signal.SIGTERM)

    def living(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.code is None]

    def pass_on(self, number: int, frame: object) -> None:
        """A signal that we were sent, to every living rank."""
        for rank in self.living():
            _signal(rank, number)
        if number in (signal.SIGTERM, signal.SIGINT):
            self.cause = self.cause or (128 + number, f"was asked to end ({name_of_signal(number)})")
            self._kill_after(self.limits.save)

    def turn(self) -> None:
        """Pass output on, notice ends and limits."""
        for key, _ in self.selector.select(timeout=TURN_SECONDS):
            self._read(key.data)
        now = time.monotonic()
        for rank in self.living():
            self._look(rank, now)
        limits = self.limits
        if self.elsewhere and now - self.looked > ELSEWHERE_SECONDS:
            self.looked = now
            if self.cause is None and (reason := self.elsewhere()):
                self._end_all(1, reason, now)
        if self.cause is None and limits.total and now - self.began > limits.total:
            self._end_all(124, f"ran longer than the limit of {limits.total:.0f} s", now)
        if self.cause is None and limits.silence and now - self.spoken > limits.silence:
            self._end_all(124, f"said nothing for {limits.silence:.0f} s and was ended as hung", now)
        if self.terminate_at is not None and now >= self.terminate_at:
            self.terminate_at = None
            for rank in self.living():
                _signal(rank, signal.SIGTERM)
            self._kill_after(self.limits.grace)
        for rank in self.living():
            if any(moment is not None and now >= moment for moment in (self.deadline, rank.kill_at)):
                _signal(rank, signal.SIGKILL, group=True)

    def _end_all(self, code: int, reason: str, now: float) -> None:
        self.cause = (code, reason)
        self.terminate_at = now

    def _kill_after(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)

    def _look(self, rank: _Rank, now: float) -> None:
        try:
            ended = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            ended = None
        if ended is None and rank.process.returncode is None:
            return
        _signal(rank, signal.SIGKILL, group=True)  # before it is reaped its group's number cannot be another's
        rank.code, rank.ended_at = rank.process.wait(), now
        rank.note = read_note(self.directory, rank.number)
        if rank.lost or (rank.code == 0 and rank.note is not None and rank.note.finishes):
            self._end_left_behind(rank, now)
        elif rank.code and self.terminate_at is None and self.deadline is None:
            self.terminate_at = now + (self.limits.grace if rank.code in AGREED else 0.0)

    def _end_left_behind(self, ended: _Rank, now: float) -> None:
        """End, after the grace period, the other ranks of a lost replica, or those that a finished round left out."""
        assert ended.note is not None
        replica = ended.note.replica
        if ended.lost and self.cause is None and self.deadline is None:
            log.warning("replica %d is lost (%s); other replicas go on", replica, _sentence(ended, len(self.ranks)))
        for rank in self.living():
            note = read_note(self.directory, rank.number)
            if note is None or note.finishes or rank.kill_at is not None:
                continue
            if note.replica == replica or not ended.lost:
                rank.kill_at = now + self.limits.grace

    def _read(self, rank: _Rank) -> None:
        assert rank.process.stdout is not None
        try:
            data = os.read(rank.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.selector.unregister(rank.process.stdout)
            data, last = b"", True
        else:
            last = False
            self.spoken = time.monotonic()
        *lines, rank.part = re.split(rb"(?<=[\n\r])", rank.part + data)
        if last and rank.part:
            lines, rank.part = [*lines, rank.part + b"\n"], b""
        prefix = b"" if len(self.ranks) == 1 else b"[rank %d] " % rank.number
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r\n")
            if line.endswith(b"\n") and text:
                rank.tail.append(text)
                if rank.traceback_at is None and text.startswith("Traceback (most recent call last)"):
                    rank.traceback_at = time.monotonic()
        self._say(b"".join(prefix + line for line in lines))

    def _say(self, data: bytes) -> None:
        """Pass output on while it can be: a reader that is gone, such as a killed coordinator, ends no training."""
        try:
            self.out.write(data)
            self.out.flush()
        except OSError as error:
            silence(self.out)
            log.warning("output cannot be passed on any longer (%s): the ranks go on without", error)

    def drain(self) -> None:
        """What the ended ranks' pipes still hold; a stray grandchild that holds one open is not waited for."""
        until = time.monotonic() + DRAIN_SECONDS
        while self.selector.get_map() and time.monotonic() < until:
            ready = self.selector.select(timeout=PAUSE_SECONDS)
            for key, _ in ready:
                self._read(key.data)
            if not ready:
                break

    def ending(self) -> Ending:
        """Why the ranks ended, as one outcome: our own cause for ending them, else the failure that came first."""
        finished = any(rank.code == 0 and rank.note is not None and rank.note.finishes for rank in self.ranks)
        failed = [rank for rank in self.ranks if rank.code and not (finished and rank.lost)]
        own = [r for r in failed if r.code not in AGREED and not (self.cause and r.code in BY_US)]
        agreed = [rank for rank in failed if rank.code in AGREED]
        if self.cause and not (agreed and not own):
            code, reason = self.cause
            tail = own[0].tail if own else self.ranks[0].tail
            return Ending(code=code, reason=reason, tail="\n".join(tail), time=time.time())
        if not failed:
            return Ending(code=0, reason="")
        # Of several that fell, the one whose traceback came first; those that we ended come last.
        first = min(own or failed, key=lambda r: (r.code in BY_US, r.traceback_at or r.ended_at or 0.0))
        assert first.code is not None
        code = first.code if first.code > 0 else 128 - first.code
        # One rank fell, and the others ended as they do when contact is lost: a transient error. So is a kill.
        fell = first.code < 0 or first.code in (1, ExitCode.INTERRUPTED)
        if first.code == -signal.SIGKILL or (fell and any(rank.code == TRANSIENT for rank in failed)):
            code = TRANSIENT
        return Ending(
            code=code,
            reason=_sentence(first, len(self.ranks)),
            tail="\n".join(first.tail),
            time=time.time(),
            missed=not all(rank.lost for rank in self.ranks),
        )

    def kill_all(self) -> None:
        for rank in self.living():
            _signal(rank, signal.SIGKILL, group=True)
            rank.process.wait()
        for rank in self.ranks:
            if rank.process.stdout is not None:
                rank.process.stdout.close()
        self.selector.close()


def silence(stream: BinaryIO) -> None:
    """Let everything that is written to a file descriptor's stream from now on go nowhere."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _sentence(rank: _Rank, ranks: int) -> str:
    subject = f"rank {rank.number}" if ranks > 1 else "the training process"
    code = rank.code or 0
    if code == -signal.SIGKILL:
        return f"{subject} was killed (SIGKILL): out of memory, or ended by the scheduler"
    how = f"was ended by {name_of_signal(-code)}" if code < 0 else f"ended with exit code {code}"
    said = error_line(rank.tail)
    if said and not said.startswith(ERROR) and not output_leaves():
        said = said.partition(":")[0]  # of an error that is not ours, whose text may quote the data
    return f"{subject} {how}" + (f": {said.removeprefix(ERROR)}" if said else "")


def _signal(rank: _Rank, number: int, *, group: bool = False) -> None:
    try:
        if group:
            os.killpg(rank.process.pid, number)
        elif rank.process.returncode is None:
            os.kill(rank.process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass
