"""When a replica is likely to come again: the record of its steps, from an exchange to its next announcement."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

REMEMBERED = 31
"""Steps of which the record is kept: enough for a median that stalls do not move and to tell who stalls often, few
enough to follow a change."""
SPREAD = 0.03
"""Part of its usual step by which a member may come later than usual and still be waited for, at least."""
STRETCHED = (1.0, 1.5, 2.2, 3.3, 5.0)
"""Times that: how late may still be as good as here. What a machine's noise adds to a step is not what a stall does."""
BEFORE = 0.1, 5.0
"""Late steps and steps that count as made before the record: most steps are not late, and who begins together is not to
part before anything is known."""
MOST = 0.25
"""Part of its usual step that one waits for another, at most."""
FIRST = 0.2
"""Part of the time that a member's first step took for which it waits for others that are at theirs."""


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
    """Seconds over the usual, ascending: from each on a step might be called late. The first is told from how much
    shorter than usual steps sometimes are, for stalls only ever make a step longer."""
    chances: list[float] = field(default_factory=lambda: [BEFORE[0] / BEFORE[1]] * len(STRETCHED))
    """That a step is later than each, by the record and `BEFORE`: never 0."""

    def left(self, now: float) -> None:
        """The next step begins: its group was formed, or (told later) its exchange is over."""
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


def patient(mine: Arrivals, theirs: Arrivals, patience: float) -> tuple[float, float]:
    """Seconds that one may wait for the other, and how much later than usual the other may be for that.

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
