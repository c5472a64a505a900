"""The scheduler of one facility's replicas, as a small asyncio service on one rank.

It drives a pure scheduler (`facility.exchange.scheduling.groups`) with the wall clock, tracks membership by heartbeat,
decides which process groups stay open, and cancels exchanges when a member is lost. A few numbers pass through it;
parameters never do. It listens on this node's address only, authenticates its peers by a random token handed out
through the store, and ends with the round.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from facility.exchange.messages.sync import SyncSettings
from facility.exchange.scheduling.groups import Group, GroupScheduler
from facility.sync.runtime import wire
from facility.sync.runtime.journal import Journal
from facility.sync.runtime.membership import Membership

log = logging.getLogger("facility.sync")
HELLO_SECONDS = 10.0
"""A connection that has not shown the token by then is closed; at the end, one that has not gone by itself."""
LAST_LOOK_SECONDS = 0.005
"""How often to look, at the end, whether the last decisions have been read and all connections have gone."""


@dataclass(kw_only=True)
class _Open:
    """A group whose end has not been reported by all of its ranks."""

    group: Group
    channel: int
    standing: bool
    votes: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """Round of the group -> ranks that succeeded in it."""
    apart: bool = False
    """True if a rank has reported that it did not average with the group's partner."""


@dataclass(kw_only=True)
class _Request:
    """A replica's announcement that has not been answered."""

    turn: int
    kind: str
    counted: bool = False


class SchedulerService:
    """Started on the chief rank; `start` returns when it listens, `stop` when it is gone."""

    def __init__(
        self, scheduler: GroupScheduler, settings: SyncSettings, *, replicas: int, positions: int, journal: Journal
    ) -> None:
        self.scheduler, self.settings, self.journal = scheduler, settings, journal
        self.replicas, self.positions = replicas, positions
        self.token = secrets.token_hex(16)
        self.members = Membership(positions=positions, missing_seconds=settings.missing_seconds)
        self._started = False
        self._writers: dict[tuple[int, int], asyncio.StreamWriter] = {}
        self._left_well: set[int] = set()
        self._requests: dict[int, _Request] = {}
        self._turns: dict[int, int] = {}
        self._rounds: dict[int, int] = {}
        self._pausing = False
        self._over: tuple[int, ...] = ()
        """Members of the final average, once it is made: a replica that comes back later is not one of them."""
        self._open: dict[int, _Open] = {}
        scheduler.ended = lambda number: number not in self._open
        self._channels: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._channel_number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._origin = 0.0
        self._loop = asyncio.new_event_loop()
        self._done = asyncio.Event()
        self._listening = threading.Event()
        self._problem: BaseException | None = None
        self.host, self.port = "", 0
        self._thread = threading.Thread(target=self._run, name="sync-scheduler", daemon=True)

    # -- life -------------------------------------------------------------------------------------------------------
    def start(self, host: str) -> None:
        self.host = host
        self._thread.start()
        self._listening.wait(HELLO_SECONDS)
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._done.set)
            self._thread.join(2 * HELLO_SECONDS)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._problem = error
            self._listening.set()
            log.exception("the scheduler stopped")
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, self.host, 0, limit=wire.LINE_BYTES)
        self.port = server.sockets[0].getsockname()[1]
        self._origin = self._loop.time()
        self._listening.set()
        watch = asyncio.create_task(self._watch())
        await self._done.wait()
        until = self._loop.time() + HELLO_SECONDS
        while self._writers and self._problem is None and self._loop.time() < until:
            await asyncio.sleep(LAST_LOOK_SECONDS)
        watch.cancel()
        server.close()
        for writer in list(self._writers.values()):
            writer.close()

    @property
    def connected(self) -> bool:
        """True while a rank is connected."""
        return bool(self._writers)

    @property
    def now(self) -> float:
        """Seconds since the service began to listen."""
        return self._loop.time() - self._origin

    async def _watch(self) -> None:
        """Detect silent ranks, and show the ranks that the scheduler is alive."""
        before = self.now
        pause = min(self.settings.heartbeat_seconds, self.settings.missing_seconds / 4)
        while True:
            await asyncio.sleep(pause)
            now = self.now
            if now - before > 2 * pause + 0.5:
                self.members.overslept(now, before + pause)
            before = now
            for replica in self.members.silent(now):
                self._leave(replica, f"not heard for {self.settings.missing_seconds} s")
            for key in list(self._writers):
                self._send(key, {"t": "beat"})

    # -- connections ------------------------------------------------------------------------------------------------
    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        key: tuple[int, int] | None = None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = wire.decode_line(await reader.readline())
            if not hmac.compare_digest(str(hello.get("token", "")).encode(), self.token.encode()):
                log.warning("a connection to the scheduler without the token was refused")
                return
            wanted = (int(hello["replica"]), int(hello["position"]))
            if not (0 <= wanted[0] < self.replicas and 0 <= wanted[1] < self.positions) or wanted in self._writers:
                log.warning("a connection to the scheduler as %s was refused", wanted)
                return
            key = wanted
            self._writers[key] = writer
            if not self._started:
                self._rounds[key[0]] = int(hello["rounds"])
                self._count(key, hello)
            self._heard(key)
            while line := await reader.readline():
                self._heard(key)
                self._message(key, wire.decode_line(line))
        except (OSError, ValueError, KeyError, asyncio.IncompleteReadError) as error:
            log.warning("connection of %s: %r", key, error)
        except Exception as error:  # our own mistake: better gone, and noticed by all, than half alive
            log.exception("the scheduler stops")
            self._problem = error
            self._done.set()
        finally:
            writer.close()
            if key is not None and self._writers.get(key) is writer:
                del self._writers[key]
                if not self._done.is_set() and key[0] not in self._left_well and self.members.gone(*key):
                    self._leave(key[0], "its connection closed")

    def _send(self, key: tuple[int, int], message: dict[str, Any]) -> None:
        writer = self._writers.get(key)
        if writer is not None and not writer.is_closing():
            writer.write(wire.encode_line(message))

    def _push(self, replicas: Any, message: dict[str, Any]) -> None:
        for replica in replicas:
            for position in range(self.positions):
                self._send((replica, position), message)

    def _heard(self, key: tuple[int, int]) -> None:
        replica = key[0]
        if replica in self._left_well or not self.members.heard(*key, self.now):
            return
        if self._over and replica not in self._over:
            self._push([replica], {"t": "over"})
            return
        if not self._started:
            if len(self.members.present) == self.replicas:
                self._started = True
                for member in sorted(self.members.present):
                    self.scheduler.join(member, self.now, returning=False, rounds=self._rounds[member])
                for member in sorted(self.members.present):
                    self._welcome(member)
            return
        self.journal.event("came back", replica, self.now, "heard again; it receives before it contributes")
        self._send_present()
        self._welcome(replica)
        self._carry_out(self.scheduler.join(replica, self.now, rounds=self._rounds.get(replica, 0)))
        if (request := self._requests.get(replica)) is not None:
            self._announce(replica, request)

    def _welcome(self, replica: int) -> None:
        self._push(
            [replica],
            {
                "t": "welcome",
                "turn": self._turns.get(replica, 0),
                "done": self.journal.updates[replica],
                "updates": self.scheduler.updates,
                "stop": self.scheduler.stop,
            },
        )

    def _leave(self, replica: int, reason: str) -> None:
        self.members.present.discard(replica)
        if not self._started:
            return
        self.journal.event("left", replica, self.now, reason)
        self._rounds[replica] = self.scheduler.rounds(replica)
        self._push([replica], {"t": "left"})
        self._send_present()
        touched = [number for number, opened in self._open.items() if replica in opened.group.members]
        for number in touched:
            self._abort(number)
        groups = self.scheduler.leave(replica, self.now)
        if touched:
            groups += self.scheduler.failed(self.now)
        self._carry_out(groups)

    def _send_present(self) -> None:
        present = sorted(self.members.present)
        self._push(present, {"t": "present", "replicas": present})

    # -- messages ---------------------------------------------------------------------------------------------------
    def _message(self, key: tuple[int, int], message: dict[str, Any]) -> None:
        kind = message["t"]
        if "u" in message:
            self._count(key, message)
        if kind == "beat" and key[1] == 0:
            self.journal.reached[key[0]] = int(message["reached"])
        elif kind in ("ready", "again", "finish"):
            self._request(key[0], int(message["turn"]), kind)
        elif kind == "told":
            self._told(key, message)
        elif kind == "pause":
            self._pausing = True
        elif kind == "summary":
            self.journal.write()
            self._send(key, {"t": "summary", "figures": self.journal.summary()})
        elif kind == "bye":
            self._left_well.add(key[0])
            self.members.present.discard(key[0])

    def _count(self, key: tuple[int, int], message: dict[str, Any]) -> None:
        """Steps and samples of a replica, as its first rank counts them."""
        if key[1] == 0:
            self.journal.updates[key[0]] = int(message["u"])
            self.journal.samples[key[0]] = message["s"]

    def _request(self, replica: int, turn: int, kind: str) -> None:
        """The first rank of a replica to announce a turn represents it; the answer goes to all of its ranks."""
        if turn <= self._turns.get(replica, 0):
            return
        self._turns[replica] = turn
        request = self._requests[replica] = _Request(turn=turn, kind=kind)
        if replica in self.members.present:
            self._announce(replica, request)

    def _announce(self, replica: int, request: _Request) -> None:
        if request.kind == "finish":
            groups = self.scheduler.finish(replica, self.now)
        else:
            again = request.counted or request.kind == "again"
            request.counted = True
            groups = self.scheduler.ready(replica, self.now, again=again)
        self._carry_out(groups)

    def _told(self, key: tuple[int, int], message: dict[str, Any]) -> None:
        number, good = int(message["uid"]), bool(message["ok"])
        opened = self._open.get(number)
        if opened is None:
            self._send(key, {"t": "abort", "uid": number})
            return
        if not good:
            log.info("group %d failed at %s: %s", number, key, message.get("why", ""))
            self._abort(number)
            self._carry_out(self.scheduler.failed(self.now))
            return
        if key[1] == 0:
            self.scheduler.exchanged(key[0], self.now)
        turn = int(message.get("round", 0))
        votes = opened.votes.setdefault(turn, set())
        votes.add(key)
        self.journal.told(number, good=True, seconds=float(message["seconds"]), sent=int(message["bytes"]), at=self.now)
        opened.apart = opened.apart or not message.get("relayed")
        if len(votes) < len(opened.group) * self.positions:
            return
        del opened.votes[turn]
        renew = opened.standing and tuple(sorted(self.members.present)) != opened.group.members
        group = opened.group
        if len(group) > 1 or group.partner is not None or self.settings.declaration.exchange == "server":
            self.journal.exchanged(group, standing=opened.standing)
        if group.final:
            self._over = tuple(int(member) for member in group.members)
        if not opened.standing or renew:
            del self._open[number]
            self.journal.ended(number, self.now)
        if opened.group.pairs and not opened.apart:
            assert opened.group.partner is not None
            self._carry_out(self.scheduler.relayed(opened.group.members[0], opened.group.partner, self.now))
        if message.get("vote"):
            verdict = {"t": "commit", "uid": number, "round": turn, "renew": renew, "pause": self._pausing}
            self._push(opened.group.members, verdict)

    # -- groups -----------------------------------------------------------------------------------------------------
    def _carry_out(self, groups: list[Group]) -> None:
        for group in groups:
            standing = self.settings.lockstep and not group.final
            channel = self._channel(group) if len(group) > 1 else 0
            self._open[group.number] = _Open(group=group, channel=channel, standing=standing)
            self.journal.decided(group, self.now, expected=len(group) * self.positions, standing=standing)
            for member in group.members:
                assert isinstance(member, int)
                request = self._requests.pop(member)
                self._push(
                    [member],
                    {
                        "t": "group",
                        "turn": request.turn,
                        "uid": group.number,
                        "channel": channel,
                        "members": group.members,
                        "weights": group.weights,
                        "rounds": group.rounds,
                        "returning": group.returning,
                        "partner": group.partner,
                        "after": group.after,
                        "together": group.together,
                        "influence": group.step_scale,
                        "final": group.final,
                        "updates": self.scheduler.updates,
                        "stop": self.scheduler.stop,
                        "pause": self._pausing,
                    },
                )
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.scheduler.wake is not None:
            self._timer = self._loop.call_at(self._origin + self.scheduler.wake, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._carry_out(self.scheduler.tick(max(self.now, self.scheduler.wake or 0.0)))

    def _channel(self, group: Group) -> int:
        """The process group for these members: one kept open, or a number never used before."""
        key = tuple(int(m) for m in group.members)
        if key in self._channels:
            self._channels.move_to_end(key)
            return self._channels[key]
        self._channel_number += 1
        self._channels[key] = self._channel_number
        busy = {opened.channel for opened in self._open.values()}
        for members, number in list(self._channels.items()):
            if len(self._channels) <= self.settings.group_cache:
                break
            if number not in busy and number != self._channel_number:
                del self._channels[members]
                self._push(members, {"t": "evict", "channel": number})
        return self._channel_number

    def _abort(self, number: int) -> None:
        """Call a group off: its process group is never used again, its ranks stop waiting."""
        opened = self._open.pop(number)
        self._forget(opened.channel)
        self.journal.called_off(number, self.now)
        self._push(opened.group.members, {"t": "abort", "uid": number})

    def _forget(self, channel: int) -> None:
        """This process group is never used again."""
        self._channels = OrderedDict((m, c) for m, c in self._channels.items() if c != channel)
