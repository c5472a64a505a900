"""A rank's connection to the scheduler: announcements out, decisions in, a heartbeat beside."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from facility.exchange.errors import TransientError
from facility.exchange.messages.sync import SyncSettings
from facility.exchange.scheduling.group import keeper_of
from facility.sync.protocol import ReplicaRank
from facility.sync.runtime import wire


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the scheduler answered to this replica's announcement."""

    uid: int
    channel: int
    """Number of the process group to use; 0 for a group of one."""
    members: tuple[int, ...]
    weights: tuple[float, ...]
    rounds: tuple[int, ...]
    returning: tuple[int, ...]
    partner: int | None
    after: int
    """Number of the group that `partner` hands on; 0: of none."""
    together: int
    """How many groups in a row these members have been together, this one included."""
    step_scale: float
    """How many times as long as usual the group's common step is to be."""
    final: bool
    updates: int
    """Updates of all replicas so far."""
    stop: bool
    """The budget of updates is spent."""
    pause: bool
    """True if a pause was requested: no further step after this exchange."""

    @property
    def keeper(self) -> int:
        """The member that keeps what the group leaves."""
        return keeper_of(self.members, self.returning)

    def share(self, member: int) -> float:
        """A member's share where all that are up to date weigh alike."""
        upright = [m for m in self.members if m not in self.returning] or self.members
        return (member in upright) / len(upright)


@dataclass(frozen=True, kw_only=True)
class Begin:
    """What the scheduler knows of this replica when it comes, or comes again in a new process."""

    turn: int
    """Announcements it has made."""
    done: int
    """Steps it has made."""
    updates: int
    """Updates of all replicas so far."""
    stop: bool


class SchedulerClient:
    """Blocking calls for the training thread; a reader and a heartbeat thread behind them."""

    def __init__(
        self,
        store: dist.Store,
        settings: SyncSettings,
        place: ReplicaRank,
        *,
        rounds: int = 0,
        told: tuple[int, float] = (0, 0.0),
    ) -> None:
        """`rounds`: announcements before a pause; `told`: steps and samples of them."""
        self.place, self.settings = place, settings
        host, port, token = store.get("scheduler").decode().split(" ")
        self._socket = socket.create_connection((host, int(port)), timeout=settings.timeout_seconds)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._change = threading.Condition()
        self._sending = threading.Lock()
        self._groups: dict[int, Decision] = {}
        self._aborted: set[int] = set()
        self._commits: dict[tuple[int, int], tuple[bool, bool]] = {}
        self._evict: list[int] = []
        self._begin: Begin | None = None
        self._left: float | None = None
        self._over = False
        self._summary: dict[str, Any] | None = None
        self.present: tuple[int, ...] = tuple(range(place.replicas))
        """Replicas that are here, ascending."""
        self.pausing = False
        self._lost = ""
        self._closing = threading.Event()
        self._heard = time.monotonic()
        self.updates, self.samples = told
        """Counters sent with every announcement (position 0 reports for its replica)."""
        self._send(
            {
                "t": "hello",
                "token": token,
                "replica": place.replica,
                "position": place.position,
                "rounds": rounds,
                "u": self.updates,
                "s": self.samples,
            }
        )
        threading.Thread(target=self._read, name="sync-reader", daemon=True).start()
        threading.Thread(target=self._beat, name="sync-heartbeat", daemon=True).start()
        self._until(
            lambda: self._begin is not None,
            limit=settings.timeout_seconds,
            what=f"all {place.replicas} replicas to start within {settings.timeout_seconds} s",
        )
        assert self._begin is not None
        self.begin: Begin = self._begin
        self._turn: int = self.begin.turn

    # -- what the policies call -------------------------------------------------------------------------------------
    def ask(self, kind: str) -> Decision:
        """Announce `ready`, `again` (after a failure) or `finish`, and wait for the group that follows."""
        self._turn += 1
        turn = self._turn
        self._send({"t": kind, "turn": turn, "u": self.updates, "s": self.samples})
        self._until(lambda: turn in self._groups, what="a group")
        decision = self._groups.pop(turn)
        self.pausing = self.pausing or decision.pause
        return decision

    def ask_to_pause(self) -> None:
        self._send({"t": "pause"})

    def report(
        self, decision: Decision, *, ok: bool, seconds: float, sent: int, why: str = "", relayed: bool = False
    ) -> None:
        """Report the end of a group, without waiting. `relayed`: its single member has averaged with its partner."""
        self._send(
            {
                "t": "told",
                "uid": decision.uid,
                "ok": ok,
                "relayed": relayed,
                "seconds": round(seconds, 6),
                "bytes": sent,
                "why": why[:200],
                "u": self.updates,
                "s": self.samples,
            }
        )

    def vote(
        self, decision: Decision, *, ok: bool, seconds: float, sent: int, number: int = 0, why: str = ""
    ) -> tuple[bool, bool]:
        """Tell, and wait until all ranks of the group have: (all succeeded, a standing group is to be renewed)."""
        self._send(
            {
                "t": "told",
                "vote": True,
                "uid": decision.uid,
                "round": number,
                "ok": ok,
                "why": why[:200],
                "seconds": round(seconds, 6),
                "bytes": sent,
                "u": self.updates,
                "s": self.samples,
            }
        )
        key = (decision.uid, number)
        self._until(lambda: key in self._commits or decision.uid in self._aborted, what="the others' votes")
        if key in self._commits:
            renew, pause = self._commits.pop(key)
            self.pausing = self.pausing or pause
            return True, renew
        return False, True

    def called_off(self, decision: Decision) -> bool:
        """True if the scheduler has aborted this group, or is gone itself."""
        return decision.uid in self._aborted or bool(self._lost)

    def summary(self) -> dict[str, Any]:
        """The scheduler's figures of all replicas; it writes its log as well."""
        self._send({"t": "summary"})
        self._until(lambda: self._summary is not None, what="the figures of the round")
        assert self._summary is not None
        return self._summary

    def take_evictions(self) -> list[int]:
        with self._change:
            numbers, self._evict = self._evict, []
        return numbers

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            try:
                self._send({"t": "bye", "u": self.updates, "s": self.samples})
                self._socket.shutdown(socket.SHUT_RDWR)
            except (OSError, TransientError):
                pass
            self._socket.close()

    # -- behind -----------------------------------------------------------------------------------------------------
    def _until(self, true: Any, *, what: str, limit: float | None = None) -> None:
        deadline = None if limit is None else time.monotonic() + limit
        with self._change:
            while not true():
                if self._lost:
                    raise TransientError(
                        f"replica {self.place.replica}: the scheduler of the replicas is gone ({self._lost})"
                    )
                if self._over:
                    raise TransientError(f"replica {self.place.replica} was away when the others finished the round")
                if self._left is not None and time.monotonic() - self._left > self.settings.timeout_seconds:
                    raise TransientError(
                        f"replica {self.place.replica} has been without one of its ranks for "
                        f"{self.settings.timeout_seconds} s; the other replicas go on without it"
                    )
                if deadline is not None and time.monotonic() > deadline:
                    raise TransientError(f"replica {self.place.replica} waited in vain for {what}")
                self._change.wait(0.5)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            with self._sending:
                self._socket.sendall(wire.encode_line(message))
        except OSError as error:
            with self._change:
                self._lost = self._lost or str(error)

    def _beat(self) -> None:
        """Show the scheduler that this rank is alive, and notice when it is silent itself.

        No other thread judges that: one that wakes first after a suspension would take that time for silence.
        """
        before, longest = time.monotonic(), 2 * self.settings.missing_seconds
        while not self._closing.wait(self.settings.heartbeat_seconds):
            now = time.monotonic()
            if now - before > self.settings.missing_seconds / 2:
                self._heard += now - before  # this process was suspended, not the scheduler
            before = now
            if now - self._heard > longest:
                with self._change:
                    self._lost = self._lost or f"not heard for {longest} s"
                    self._change.notify_all()
            self._send({"t": "beat", "reached": self.updates})

    def _read(self) -> None:
        reason = "it closed the connection"
        try:
            with self._socket.makefile("rb") as lines:
                while line := lines.readline(wire.LINE_BYTES):
                    self._take(wire.decode_line(line))
        except (OSError, ValueError) as error:
            reason = str(error)
        with self._change:
            self._lost = self._lost or reason
            self._change.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        with self._change:
            self._heard = time.monotonic()
            if kind == "group":
                self._groups[message["turn"]] = Decision(
                    uid=message["uid"],
                    channel=message["channel"],
                    members=tuple(message["members"]),
                    weights=tuple(message["weights"]),
                    rounds=tuple(message["rounds"]),
                    returning=tuple(message["returning"]),
                    partner=message["partner"],
                    after=message["after"],
                    together=message["together"],
                    step_scale=message["influence"],
                    final=message["final"],
                    updates=message["updates"],
                    stop=message["stop"],
                    pause=message["pause"],
                )
            elif kind == "present":
                self.present = tuple(message["replicas"])
            elif kind == "summary":
                self._summary = message["figures"]
            elif kind == "over":
                self._over = True
            elif kind == "abort":
                self._aborted.add(message["uid"])
            elif kind == "commit":
                self._commits[message["uid"], message["round"]] = message["renew"], message["pause"]
            elif kind == "evict":
                self._evict.append(message["channel"])
            elif kind == "welcome":
                self._left = None
                self._begin = self._begin or Begin(
                    turn=message["turn"], done=message["done"], updates=message["updates"], stop=message["stop"]
                )
            elif kind == "left":
                self._left = time.monotonic()
            self._change.notify_all()
