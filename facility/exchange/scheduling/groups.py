"""Which members average together, and when: a pure state machine for semi-decentralised averaging.

Members announce that they are ready; the scheduler answers with groups. It only decides; parameters travel between
the members. It has no clock: every event carries its time, and `wake` says when `tick` is wanted. The same object
decides for processes inside a facility, for the simulator, and for facilities at the coordinator.

After Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware Pipeline-parallel Training", PVLDB
16(9):2354-2363, 2023 (groups by time window, union-find bound P) and Miao et al., "Heterogeneity-Aware Distributed
Machine Learning Training via Partial Reduce", SIGMOD 2021. Different here, on purpose:

- one rule for any number of members (there: pairs and full barriers beyond 8);
- the bound is strict: between two moments at which the union of the groups was connected lie at most P x N updates;
  a period ends as soon as its union is connected, so an early connection is never wasted;
- a connecting group needs one member of each component, not all;
- once half of the bound is used, a member in a small component does not proceed alone: otherwise a slow member that
  happens to arrive alone makes all others wait for its next arrival (one worker 5x slower: 3.5 becomes 4.4 times
  all-reduce);
- a first arrival waits only for members that are expected soon, by the usual length of their steps; the more rarely
  both are late, the longer it waits, since lateness is what separates them again. Where all are steady, groups of all
  form; where stalls are frequent, waits are rare (a fixed window either misses members that arrive a moment later, or
  delays every member that is alone);
- members leave and come back; one that comes back first receives (weight 0) and then contributes;
- contributions are debiased: weight = mean rounds / own rounds, within a limit; a group also says by how much its
  common step is to be longer (`step_scale`), so that parameters themselves need no weights.
"""

from __future__ import annotations

import math

from facility.exchange.scheduling.arrivals import FIRST, wait_budget
from facility.exchange.scheduling.group import Group, GroupRules, Member
from facility.exchange.scheduling.group_state import GroupState

__all__ = ["Group", "GroupRules", "GroupScheduler", "Member"]


class GroupScheduler(GroupState):
    """Events in, groups out. Every event method returns the groups it closes, in the order to be carried out."""

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
        """`member` died, stalled or left; the others no longer wait for it."""
        self._members.pop(member, None)
        self._pending.pop(member, None)
        self._note_connection()
        return self._form(now)

    def ready(self, member: Member, now: float, *, again: bool = False) -> list[Group]:
        """`member` has made one more update and wants to average; `again`: its group failed, no new update."""
        state = self._members[member]
        assert member not in self._pending and not state.finished, f"{member!r} announced itself twice"
        if not again:
            state.rounds += 1
            self._updates += 1
            state.arrivals.came(now)
        self._pending[member] = now
        return self._form(now)

    def exchanged(self, member: Member, now: float) -> None:
        """`member` has done with its group's exchange and begins its next step; forms no group.

        Without this event the exchange counts as part of the step, and a member that it makes late is not waited for.
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
            for state in self._members.values():
                if state.component == other:
                    state.component = joined
            self._note_connection()
        return self._form(now)

    def finish(self, member: Member, now: float) -> list[Group]:
        """`member` makes no more updates and waits for the final average over all."""
        self._members[member].finished = True
        self._pending[member] = now
        self._note_connection()
        return self._form(now)

    def tick(self, now: float) -> list[Group]:
        return self._form(now)

    def failed(self, now: float) -> list[Group]:
        """A group's exchange failed; what was counted as connected may not be, so components are taken apart.

        Its members announce themselves again: `ready(again=True)`, or `finish` after a final group.
        """
        for state in self._members.values():
            state.last = state.kept = None
            if len(self.active) > 1:
                self._components += 1
                state.component = self._components
        return self._form(now)

    # -- the rule ---------------------------------------------------------------------------------------------------
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
            return None  # a member that is up to date must take part
        chosen = self._choose(pending, self.rules.maximum or len(pending))
        if not everybody and len(chosen) == 1 and self._apart(chosen[0], active) and self.may_hold(wanted=True):
            return None
        if self._bound_allows(chosen, active):
            reason = "all are here" if everybody else "full" if full else "the window passed"
            return self._close(chosen, now, reason)
        chosen = self._choose(pending, max(self.rules.maximum or len(pending), len(self._parts(active))))
        if self._connects(chosen, active):
            return self._close(chosen, now, "the bound asks for a connection")
        if self.may_hold(wanted=True):
            return None
        return self._close(chosen, now, "another stage is being connected")

    def _worth_waiting(self, pending: list[Member], active: tuple[Member, ...], now: float) -> float:
        """Time until which the members that are ready wait for others."""
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
            pairs = [(m, *wait_budget(self._members[m].arrivals, theirs, self.rules.patience)) for m in pending]
            limit = min(self._pending[m] + waits for m, waits, _ in pairs)
            soon = theirs.expected(first.arrivals.usual)
            last = soon + min(late for _, _, late in pairs)
            if soon <= limit and last > now:
                until = max(until, min(last, limit))
        return until

    def _connects(self, chosen: list[Member], active: tuple[Member, ...]) -> bool:
        return self._parts(chosen) == self._parts(active)

    def _bound_allows(self, chosen: list[Member], active: tuple[Member, ...]) -> bool:
        if self.rules.bound == 0 or self._connects(chosen, active):
            return True
        # The connecting group that may follow has at most N members, so P x N holds with it.
        return self._served + len(chosen) <= (self.rules.bound - 1) * len(active)

    def _apart(self, member: Member, active: tuple[Member, ...]) -> bool:
        """True if half of the bound is used and `member` is still in a small component: then it waits for others.

        Otherwise a slow member that happens to arrive alone makes all wait for its next arrival at the bound.
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
        states = [self._members[m] for m in chosen]
        joined = states[0].component
        merged = {s.component for s in states}
        for state in self._members.values():
            if state.component in merged:
                state.component = joined
        self._served += len(chosen)
        connected = self._note_connection()
        partner, after = self._relaying(chosen)
        group = self._group(chosen, now, reason, connected=connected, partner=partner, after=after)
        self._recent.append(group)
        for state in states:
            grown = state.window * (2.0 if len(chosen) < self.rules.target else 0.9)
            state.window = min(max(grown, self.rules.window_minimum_seconds), self.rules.window_maximum_seconds)
            if len(chosen) > 1:
                state.returning = False
            state.arrivals.left(now)
        return group

    def _final(self, now: float) -> Group | None:
        if not self._members or not all(m in self._pending for m in self._members):
            return None
        return self._group(list(self.members), now, "all have finished", connected=True, final=True)
