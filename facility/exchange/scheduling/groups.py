"""Who averages with whom, and when: a pure state machine for semi-decentralised averaging.

Members announce that they are ready; the scheduler answers with groups. It only decides; parameters travel between
the members. It has no clock: every event carries its time, and `wake` says when `tick` is wanted. The same object
decides for processes inside a facility, for the simulator, and for facilities at the coordinator.

After Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware Pipeline-parallel Training", PVLDB
16(9):2354-2363, 2023 (groups by time window, union-find bound P) and Miao et al., "Heterogeneity-Aware Distributed
Machine Learning Training via Partial Reduce", SIGMOD 2021. Different here, on purpose:

- one rule for any number of members (there: pairs and full barriers beyond 8);
- the bound is strict: between two moments at which the union of the groups was connected lie at most P x N updates;
  a period ends as soon as its union is connected, so an early connection is never wasted;
- a connecting group needs one member of each component, not everybody;
- once half of the bound is gone, a member in a small component does not go alone: otherwise somebody slow that happens
  to come alone makes all others wait for its next time (one worker 5x slower: 3.5 becomes 4.4 times all-reduce);
- a first arrival waits for those who are expected soon, by how long their steps usually take, and for nobody else:
  the longer, the more rarely both are late, for it is by lateness that they part again. Where all are steady this ends
  in groups of all, where stalls are frequent hardly anybody waits (a fixed window either misses those who come a moment
  later, or is waited in vain by everybody who is alone);
- members leave and come back; one that comes back first receives (weight 0) and then contributes;
- contributions are debiased: weight = mean rounds / own rounds, within a limit; a group also says by how much its
  common step is to be longer (`influence`), so that parameters themselves need no weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from facility.exchange.errors import ConfigurationError
from facility.exchange.scheduling.arrivals import FIRST, Arrivals, patient
from facility.exchange.scheduling.group import Group, GroupRules, Member

FORMAT = 1
RECENT = 8
"""Groups that are remembered, for one of them to be handed on."""
TIMED, ASKED_AGAIN = 9, 100
"""Timings of handing on before their median is judged; for how many groups it then stays off if it takes too long."""
__all__ = ["Group", "GroupRules", "GroupScheduler", "Member"]


@dataclass(kw_only=True)
class _Standing:
    """What the scheduler knows of one member."""

    window: float
    component: int
    rounds: int = 0
    finished: bool = False
    returning: bool = False
    last: int | None = None
    """Number of its last group; None when that failed, or after a pause."""
    together: int = 0
    """How many groups in a row that group's members had been together."""
    kept: int | None = None
    """Number of the group whose leavings it may hand on."""
    taker: int = 0
    """Number of the group of the last one that averages with it while it computes."""
    arrivals: Arrivals = field(default_factory=Arrivals)


class GroupScheduler:
    """Events in, groups out. Every event method returns the groups it closes, in the order to be carried out."""

    def __init__(self, members: Iterable[Member] = (), rules: GroupRules | None = None) -> None:
        self.rules = rules or GroupRules()
        self._members: dict[Member, _Standing] = {}
        self._pending: dict[Member, float] = {}
        self._number = 0
        self._served = 0  # updates since the union was last connected
        self._updates = 0
        self._components = 0
        self._now = 0.0
        self._recent: deque[Group] = deque(maxlen=RECENT)
        self._relays: deque[float] = deque(maxlen=TIMED)
        """Seconds, in parts of a usual step, that the last ones took who averaged with a partner."""
        self._refused = 0
        self.ended: Callable[[int], bool] = lambda number: True
        """Asked whether all members of that group have told of its good end (`failed` tells of a bad one)."""
        self.wake: float | None = None
        """Time at which `tick` is wanted; None: only an event changes anything."""
        for member in members:
            self._add(member, returning=False)

    # -- what it knows --------------------------------------------------------------------------------------------
    @property
    def members(self) -> tuple[Member, ...]:
        """Present members, sorted."""
        return tuple(sorted(self._members, key=lambda m: (isinstance(m, str), m)))

    @property
    def active(self) -> tuple[Member, ...]:
        """Present members that have not finished."""
        return tuple(m for m in self.members if not self._members[m].finished)

    @property
    def waiting(self) -> tuple[Member, ...]:
        return tuple(self._pending)

    @property
    def updates(self) -> int:
        """Updates announced by all members, including those that left since."""
        return self._updates

    @property
    def since_connected(self) -> int:
        """Updates served since the union of groups was last connected."""
        return self._served

    @property
    def stop(self) -> bool:
        """Is the budget of updates spent?"""
        return 0 < self.rules.budget <= self._updates

    def rounds(self, member: Member) -> int:
        return self._members[member].rounds

    # -- events -----------------------------------------------------------------------------------------------------
    def join(self, member: Member, now: float, *, returning: bool = True, rounds: int = 0) -> list[Group]:
        """`member` comes (back). `returning`: its parameters are out of date, so it first only receives.

        `rounds`: updates it made before; those of a phase that goes on after a pause (not `returning`) are counted.
        """
        assert member not in self._members, f"{member!r} is present already"
        self._updates += 0 if returning else rounds
        self._add(member, returning=returning and bool(self._members), rounds=rounds)
        self._members[member].arrivals.began = now
        return self._form(now)

    def leave(self, member: Member, now: float) -> list[Group]:
        """`member` died, stalled or left; nobody waits for it any longer."""
        self._members.pop(member, None)
        self._pending.pop(member, None)
        self._note_connection()
        return self._form(now)

    def ready(self, member: Member, now: float, *, again: bool = False) -> list[Group]:
        """`member` has made one more update and wants to average; `again`: its group failed, no new update."""
        standing = self._members[member]
        assert member not in self._pending and not standing.finished, f"{member!r} announced itself twice"
        if not again:
            standing.rounds += 1
            self._updates += 1
            standing.arrivals.came(now)
        self._pending[member] = now
        return self._form(now)

    def exchanged(self, member: Member, now: float) -> None:
        """`member` has done with its group's exchange and begins its next step; forms no group.

        Without this event the exchange counts with the step, and who comes late by it is not waited for.
        """
        if member in self._members and member not in self._pending:
            arrivals = self._members[member].arrivals
            if any(g.pairs and g.number == self._members[member].last for g in self._recent):
                assert arrivals.since is not None
                self._relays.append((now - arrivals.since) / (arrivals.usual or math.inf))
            arrivals.left(now)

    def relayed(self, member: Member, keeper: Member, now: float) -> list[Group]:
        """`member`, alone in its group, averaged parameters with `keeper`: connects them as a group of both would."""
        if member in self._members and keeper in self._members:
            joined, other = self._members[member].component, self._members[keeper].component
            for standing in self._members.values():
                if standing.component == other:
                    standing.component = joined
            self._note_connection()
        return self._form(now)

    def finish(self, member: Member, now: float) -> list[Group]:
        """`member` makes no more updates and waits for the final average over all."""
        self._members[member].finished = True
        self._pending[member] = now
        self._note_connection()
        return self._form(now)

    def may_hold(self, wanted: bool) -> bool:
        """May members be held back until the bound's connection can be made? Asked with True before, told False after.

        Here: always. A subclass may refuse: then a group closes all the same, and the bound is made up for as soon as
        it agrees.
        """
        return wanted

    def tick(self, now: float) -> list[Group]:
        return self._form(now)

    def failed(self, now: float) -> list[Group]:
        """A group's exchange failed; what was counted as connected may not be, so components are taken apart.

        Its members announce themselves again: `ready(again=True)`, or `finish` after a final group.
        """
        for standing in self._members.values():
            standing.last = standing.kept = None
            if len(self.active) > 1:
                self._components += 1
                standing.component = self._components
        return self._form(now)

    # -- the rule ---------------------------------------------------------------------------------------------------
    def _add(self, member: Member, *, returning: bool, rounds: int = 0) -> None:
        self._components += 1
        self._members[member] = _Standing(
            window=self.rules.window_seconds, component=self._components, returning=returning, rounds=rounds
        )

    def _form(self, now: float) -> list[Group]:
        assert now >= self._now, "time runs forwards"
        self._now, self.wake = now, None
        groups: list[Group] = []
        while (group := self._next(now)) is not None:
            groups.append(group)
        return groups

    def _next(self, now: float) -> Group | None:
        active = self.active
        if not active:
            return self._final(now)
        pending = [m for m in self._pending if not self._members[m].finished]
        if not pending:
            return None
        everybody = len(pending) == len(active)
        full = 0 < self.rules.maximum <= len(pending)
        until = self._worth_waiting(pending, active, now)
        if not (everybody or full or now >= until):
            self.wake = until
            return None
        if len(pending) < self.rules.minimum and not everybody:
            return None
        if all(self._members[m].returning for m in pending) and not everybody:
            return None  # somebody up to date must take part
        chosen = self._choose(pending, self.rules.maximum or len(pending))
        if not everybody and len(chosen) == 1 and self._apart(chosen[0], active) and self.may_hold(True):
            return None
        if self._bound_allows(chosen, active):
            reason = "all are here" if everybody else "full" if full else "the window passed"
            return self._close(chosen, now, reason)
        chosen = self._choose(pending, max(self.rules.maximum or len(pending), len(self._parts(active))))
        if self._connects(chosen, active):
            return self._close(chosen, now, "the bound asks for a connection")
        if self.may_hold(True):
            return None
        return self._close(chosen, now, "another stage is being connected")

    def _worth_waiting(self, pending: list[Member], active: tuple[Member, ...], now: float) -> float:
        """Until when those that are here wait for company."""
        first = self._members[pending[0]]
        came = self._pending[pending[0]]
        if self.rules.patience and first.rounds == 1:
            others = any(self._members[m].rounds == 0 for m in active)
            return came + max(first.window, FIRST * (came - first.arrivals.began)) if others else came
        if not self.rules.patience or any(self._members[m].arrivals.usual is None for m in pending):
            return came + first.window
        until = now
        for other in active:
            if other in self._pending:
                continue
            theirs = self._members[other].arrivals
            pairs = [(m, *patient(self._members[m].arrivals, theirs, self.rules.patience)) for m in pending]
            limit = min(self._pending[m] + waits for m, waits, _ in pairs)
            soon = theirs.expected(first.arrivals.usual)
            last = soon + min(late for _, _, late in pairs)
            if soon <= limit and last > now:
                until = max(until, min(last, limit))
        return until

    def _parts(self, members: Iterable[Member]) -> set[int]:
        return {self._members[m].component for m in members}

    def _connects(self, chosen: list[Member], active: tuple[Member, ...]) -> bool:
        return self._parts(chosen) == self._parts(active)

    def _bound_allows(self, chosen: list[Member], active: tuple[Member, ...]) -> bool:
        if self.rules.bound == 0 or self._connects(chosen, active):
            return True
        # The connecting group that may follow has at most N members, so P x N holds with it.
        return self._served + len(chosen) <= (self.rules.bound - 1) * len(active)

    def _apart(self, member: Member, active: tuple[Member, ...]) -> bool:
        """Is half of the bound gone and `member` still in a small part of the whole? Then it waits for company.

        Otherwise somebody slow that happens to come alone makes all wait for its next time when the bound is reached.
        """
        if self.rules.bound == 0 or 2 * self._served <= (self.rules.bound - 1) * len(active):
            return False
        own = self._members[member].component
        return 2 * sum(self._members[m].component == own for m in active) <= len(active)

    def _choose(self, pending: list[Member], limit: int) -> list[Member]:
        """At most `limit` of the pending: first one of each component, then by arrival; one is up to date."""
        seen: set[int] = set()
        firsts: list[Member] = []
        rest: list[Member] = []
        for member in sorted(pending, key=lambda m: self._members[m].returning):
            component = self._members[member].component
            (rest if component in seen else firsts).append(member)
            seen.add(component)
        return (firsts + rest)[:limit]

    def _close(self, chosen: list[Member], now: float, reason: str) -> Group:
        standings = [self._members[m] for m in chosen]
        joined = standings[0].component
        merged = {s.component for s in standings}
        for standing in self._members.values():
            if standing.component in merged:
                standing.component = joined
        self._served += len(chosen)
        connected = self._note_connection()
        partner, after = self._relaying(chosen)
        group = self._group(chosen, now, reason, connected=connected, partner=partner, after=after)
        self._recent.append(group)
        for standing in standings:
            grown = standing.window * (2.0 if len(chosen) < self.rules.target else 0.9)
            standing.window = min(max(grown, self.rules.window_minimum_seconds), self.rules.window_maximum_seconds)
            if len(chosen) > 1:
                standing.returning = False
            standing.arrivals.left(now)
        return group

    def _relaying(self, chosen: list[Member]) -> tuple[Member | None, int]:
        """The keeper of an earlier group that hands on its gradient and parameters to these, and that group's number.

        That is the last group that is over, formed since any of these was in one (None, 0: there is none).
        Nothing is handed on after its keeper's next group; one at a time averages parameters with it.
        """
        if not self.rules.relay or any(self._members[m].returning for m in chosen) or self._too_long():
            return None, 0
        for group in reversed(self._recent):
            if set(group.members) & set(chosen):
                break
            keeper = group.keeper
            standing = self._members.get(keeper)
            if standing is None or standing.kept != group.number or not self.ended(group.number):
                continue
            if len(chosen) == 1:
                if not self.ended(standing.taker):
                    continue
                standing.taker = self._number + 1
                standing.last = None  # its parameters move, so it is no longer where the others of its group are
            return keeper, group.number
        return None, 0

    def _too_long(self) -> bool:
        """Does handing on take more of a step than the rules allow? Asked again after a while."""
        if len(self._relays) < TIMED or median(self._relays) <= self.rules.relay:
            return False
        self._refused += 1
        if self._refused == ASKED_AGAIN:
            self._refused = 0
            self._relays.clear()
        return True

    def _note_connection(self) -> bool:
        """Begin a new period when the union of the present, active members is connected."""
        if len(self._parts(self.active)) > 1 or not self._members:
            return False
        self._served = 0
        self.may_hold(False)
        for standing in self._members.values():
            self._components += 1
            standing.component = self._components
        return True

    def _final(self, now: float) -> Group | None:
        if not self._members or not all(m in self._pending for m in self._members):
            return None
        return self._group(list(self.members), now, "all have finished", connected=True, final=True)

    def _group(
        self,
        chosen: list[Member],
        now: float,
        reason: str,
        *,
        connected: bool,
        final: bool = False,
        partner: Member | None = None,
        after: int = 0,
    ) -> Group:
        members = tuple(sorted(chosen, key=lambda m: (isinstance(m, str), m)))
        rounds = tuple(self._members[m].rounds for m in members)
        self._number += 1
        together = self._together(members)
        weights, influence = self._weights(members, final=final)
        for member in members:
            standing = self._members[member]
            standing.last = standing.kept = self._number
            standing.together = together
        group = Group(
            number=self._number,
            members=members,
            weights=weights,
            rounds=rounds,
            staleness=tuple(max(rounds) - r for r in rounds),
            waits=tuple(now - self._pending.get(m, now) for m in members),
            connected=connected,
            final=final,
            reason=reason,
            returning=tuple(m for m in members if self._members[m].returning),
            together=together,
            influence=influence,
            partner=partner,
            after=after,
        )
        for member in members:
            self._pending.pop(member, None)
        return group

    def _together(self, members: tuple[Member, ...]) -> int:
        first, *others = (self._members[m] for m in members)
        if first.last is None or any(s.last != first.last for s in others) or not self.ended(first.last):
            return 1
        return first.together + 1

    def _weights(self, members: tuple[Member, ...], *, final: bool) -> tuple[tuple[float, ...], float]:
        """Each member's weight, and the group's influence."""
        standings = [self._members[m] for m in members]
        raw = [1.0] * len(members)
        if self.rules.debias and not final:
            everyone = [s.rounds for s in self._members.values() if s.rounds]
            mean = sum(everyone) / len(everyone) if everyone else 1.0
            limit = self.rules.debias_limit
            raw = [min(limit, max(1 / limit, mean / max(1, s.rounds))) for s in standings]
        contributing = sum(not s.returning for s in standings) or len(standings)
        if contributing < len(standings):
            raw = [0.0 if s.returning else w for w, s in zip(raw, standings, strict=True)]
        total = sum(raw)
        return tuple(w / total for w in raw), total / contributing

    # -- between invocations ----------------------------------------------------------------------------------------
    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain data, for a driver that does not stay alive (the coordinator between rounds)."""
        return {
            "format": FORMAT,
            "rules": asdict(self.rules),
            "members": [[m, asdict(s)] for m, s in self._members.items()],
            "pending": [[m, at] for m, at in self._pending.items()],
            "number": self._number,
            "served": self._served,
            "updates": self._updates,
            "components": self._components,
            "now": self._now,
            "wake": self.wake,
        }

    @classmethod
    def restore(cls, state: dict[str, Any]) -> GroupScheduler:
        """The scheduler whose `snapshot` this is. Raises `ConfigurationError` for anything else."""
        try:
            if state["format"] != FORMAT:
                raise ConfigurationError(f"format {state['format']} of the scheduler's state, expected {FORMAT}")
            scheduler = cls(rules=GroupRules(**state["rules"]))
            scheduler._members = {
                m: _Standing(**(s | {"arrivals": Arrivals(**s.get("arrivals", {}))})) for m, s in state["members"]
            }
            scheduler._pending = {m: float(at) for m, at in state["pending"]}
            scheduler._number, scheduler._served = int(state["number"]), int(state["served"])
            scheduler._updates, scheduler._components = int(state["updates"]), int(state["components"])
            scheduler._now, scheduler.wake = float(state["now"]), state["wake"]
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"this is not a scheduler's state: {error!r}") from None
        return scheduler
