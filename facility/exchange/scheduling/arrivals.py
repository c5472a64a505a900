"""When a replica is likely to be ready again, from the record of its steps (each from an exchange to the next
announcement)."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

REMEMBERED = 31
"""Length of the record in steps: enough for a median that rare stalls do not move and to recognise frequent ones, few
enough to follow a change."""
SPREAD = 0.03
"""Part of its usual step by which a member may come later than usual and still be waited for, at least."""
STRETCHED = (1.0, 1.5, 2.2, 3.3, 5.0)
"""Multiples of that spread: the latenesses considered, from a machine's noise to a stall."""
BEFORE = 0.1, 5.0
"""Prior of the chance to be late, as late steps and steps: most steps are not late, and replicas that begin together
stay together until something is known."""
MOST = 0.25
"""Longest wait for another replica, as part of the waiting one's usual step."""
FIRST = 0.2
"""Wait after the first step for replicas that still make theirs, as part of that step's time."""


@dataclass(kw_only=True)
class Arrivals:
    """Seconds that one member's last steps took, and what follows from them (worked out once a step)."""

    began: float = 0.0
    """When it came to the others."""
    since: float | None = None
    """When its last exchange was over, or while it lasts, when its group was formed; None before the first."""
    steps: list[float] = field(default_factory=list)
    usual: float | None = None
    """Seconds that a step usually takes; None without a record. The median: rare stalls do not count."""
    lateness: list[float] = field(default_factory=lambda: [0.0] * len(STRETCHED))
    """Thresholds of lateness: seconds over the usual, ascending. The first is estimated from how much shorter than
    usual steps are sometimes, since a stall only makes a step longer."""
    chances: list[float] = field(default_factory=lambda: [BEFORE[0] / BEFORE[1]] * len(STRETCHED))
    """Estimated chance that a step is later than each threshold, by the record and the prior: never 0."""

    def left(self, now: float) -> None:
        """The next step begins: its group was formed, or (reported later) its exchange is over."""
        self.since = now

    def came(self, now: float) -> None:
        """It has made its step."""
        if self.since is None:
            return
        self.steps = [*self.steps, now - self.since][-REMEMBERED:]
        self.usual = usual = median(self.steps)
        least = max(SPREAD * usual, 2 * (usual - min(self.steps)))
        self.lateness = [least * times for times in STRETCHED]
        self.chances = [
            (sum(seconds > usual + late for seconds in self.steps) + BEFORE[0]) / (len(self.steps) + BEFORE[1])
            for late in self.lateness
        ]

    def expected(self, others: float | None = None) -> float:
        """When it usually arrives next; without a record, as if its steps took as long as `others`' usually do.

        Infinite where neither is known.
        """
        usual = others if self.usual is None else self.usual
        return float("inf") if usual is None or self.since is None else self.since + usual


def wait_budget(mine: Arrivals, theirs: Arrivals, patience: float) -> tuple[float, float]:
    """Seconds that one replica may wait for the other, and how much later than usual the other may be for that.

    A wait pays for the steps that both then make together, until one is late again: `patience` of a usual step each,
    `MOST` of one in all. A replica is late if it arrives later than the other would wait, so the two values depend on
    each other: of the consistent pairs, the longest wait.
    """
    found = (0.0, 0.0)
    lateness = mine.lateness if theirs.usual is None else theirs.lateness
    for place, (own, other) in enumerate(zip(mine.lateness, lateness, strict=True)):
        worth = (mine.usual or 0.0) * min(MOST, patience / (mine.chances[place] + theirs.chances[place]))
        if place == 0 or worth >= max(own, other):
            found = worth, other
    return found
