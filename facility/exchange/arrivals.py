"""When a replica is likely to come again: the record of its steps, from an exchange to its next announcement."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

REMEMBERED = 31
"""Steps of which the record is kept: enough for a median that stalls do not move and to tell who stalls often, few
enough to follow a change."""
SPREAD = 0.03
"""Part of its usual step by which a member may come later than usual and still be waited for, at least."""


@dataclass(kw_only=True)
class Arrivals:
    """Seconds that one member's last steps took, and what follows from them (worked out once a step)."""

    since: float | None = None
    """When its last exchange was over, or while it lasts, when its group was formed; None before the first."""
    steps: list[float] = field(default_factory=list)
    usual: float | None = None
    """Seconds that a step usually takes; None without a record. The median: rare stalls do not count."""
    allowance: float = 0.0
    """Seconds over the usual from which a step is late: told from how much shorter than usual steps sometimes are, for
    stalls only ever make a step longer."""
    disturbance: float = 0.5
    """The chance that a step is late, by the record (Laplace's rule of succession: never 0, 1/2 without one)."""

    def left(self, now: float) -> None:
        """The next step begins: its group was formed, or (told later) its exchange is over."""
        self.since = now

    def came(self, now: float) -> None:
        """It has made its step."""
        if self.since is None:
            return
        self.steps = [*self.steps, now - self.since][-REMEMBERED:]
        self.usual = usual = median(self.steps)
        self.allowance = max(SPREAD * usual, 2 * (usual - min(self.steps)))
        late = sum(seconds > usual + self.allowance for seconds in self.steps)
        self.disturbance = (late + 1) / (len(self.steps) + 2)

    def expected(self) -> tuple[float, float]:
        """When it usually comes next, and when it is late; both infinite and past without a record."""
        if self.usual is None or self.since is None:
            return float("inf"), float("-inf")
        return self.since + self.usual, self.since + self.usual + self.allowance
