"""What a scheduler of groups knows of its members (replicas, or facilities), and how it forms a group of chosen ones.

Pure state: the clock is an argument, and nothing is sent. Who is chosen: `facility.exchange.scheduling.groups`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Self

from facility.exchange.errors import ConfigurationError
from facility.exchange.scheduling.arrivals import Arrivals
from facility.exchange.scheduling.group import Group, GroupRules, Member
from facility.exchange.validation import check_format

FORMAT = 1
RECENT = 8
"""Groups that are remembered, for one of them to be handed on."""
TIMED, ASKED_AGAIN = 9, 100
"""Timings of handing on before their median is judged; for how many groups it then stays off if it takes too long."""


@dataclass(kw_only=True)
class MemberState:
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
    """Number of the group whose cached gradient it may pass on."""
    taker: int = 0
    """Number of the group of the last one that averages with it while it computes."""
    arrivals: Arrivals = field(default_factory=Arrivals)


class GroupState:
    """Members, the components that their groups have connected, and the groups formed so far; it decides nothing."""

    def __init__(self, members: Iterable[Member] = (), rules: GroupRules | None = None) -> None:
        self.rules = rules or GroupRules()
        self._members: dict[Member, MemberState] = {}
        self._pending: dict[Member, float] = {}
        self._number = 0
        self._served = 0  # updates since the union was last connected
        self._updates = 0
        self._components = 0
        self._now = 0.0
        self._recent: deque[Group] = deque(maxlen=RECENT)
        self._relays: deque[float] = deque(maxlen=TIMED)
        """Seconds, in parts of a usual step, that the last averages with a partner took."""
        self._refused = 0
        self.ended: Callable[[int], bool] = lambda number: True
        """Returns whether all members have reported that group's success (`failed` reports a failure)."""
        self.wake: float | None = None
        """Time at which `tick` is wanted; None: only an event changes anything."""
        for member in members:
            self._add(member, returning=False)

    # -- what is known --------------------------------------------------------------------------------------------
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
    def stop(self) -> bool:
        """True if the budget of updates is spent."""
        return 0 < self.rules.budget <= self._updates

    def rounds(self, member: Member) -> int:
        return self._members[member].rounds

    def may_hold(self, wanted: bool) -> bool:
        """True if members may be held back until the bound's connection is made; `wanted`: True before, False after.

        Here: always. A subclass may refuse: then a group closes all the same, and the bound is made up for as soon as
        it agrees.
        """
        return wanted

    # -- members and components ------------------------------------------------------------------------------------
    def _add(self, member: Member, *, returning: bool, rounds: int = 0) -> None:
        self._components += 1
        self._members[member] = MemberState(
            window=self.rules.window_seconds, component=self._components, returning=returning, rounds=rounds
        )

    def _parts(self, members: Iterable[Member]) -> set[int]:
        return {self._members[m].component for m in members}

    def _note_connection(self) -> bool:
        """Begin a new period when the union of the present, active members is connected."""
        if len(self._parts(self.active)) > 1 or not self._members:
            return False
        self._served = 0
        self.may_hold(wanted=False)
        for state in self._members.values():
            self._components += 1
            state.component = self._components
        return True

    # -- groups -----------------------------------------------------------------------------------------------------
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
        weights, step_scale = self._weights(members, final=final)
        for member in members:
            state = self._members[member]
            state.last = state.kept = self._number
            state.together = together
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
            step_scale=step_scale,
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
        """Each member's weight, and the group's step_scale."""
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
            state = self._members.get(keeper)
            if state is None or state.kept != group.number or not self.ended(group.number):
                continue
            if len(chosen) == 1:
                if not self.ended(state.taker):
                    continue
                state.taker = self._number + 1
                state.last = None  # its parameters move, so it is no longer where the others of its group are
            return keeper, group.number
        return None, 0

    def _too_long(self) -> bool:
        """True if handing on takes more of a step than the rules allow; asked again after a while."""
        if len(self._relays) < TIMED or median(self._relays) <= self.rules.relay:
            return False
        self._refused += 1
        if self._refused == ASKED_AGAIN:
            self._refused = 0
            self._relays.clear()
        return True

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
    def restore(cls, state: dict[str, Any]) -> Self:
        """The scheduler whose `snapshot` this is. Raises `ConfigurationError` for anything else."""
        try:
            check_format(state, FORMAT)
            if state["format"] != FORMAT:
                raise ConfigurationError(f"format {state['format']} of the scheduler's state, expected {FORMAT}")
            scheduler = cls(rules=GroupRules(**state["rules"]))
            scheduler._members = {
                m: MemberState(**(s | {"arrivals": Arrivals(**s.get("arrivals", {}))})) for m, s in state["members"]
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
