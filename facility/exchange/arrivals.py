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
    """Seconds that one member's last steps took."""

    since: float | None = None
    """When its last exchange was over, or while it lasts, when its group was formed; None before the first."""
    steps: list[float] = field(default_factory=list)

    def left(self, now: float) -> None:
        """The next step begins: its group was formed, or (told later) its exchange is over."""
        self.since = now

    def came(self, now: float) -> None:
        """It has made its step."""
        if self.since is not None:
            self.steps = [*self.steps, now - self.since][-REMEMBERED:]

    @property
    def usual(self) -> float | None:
        """Seconds that a step usually takes; None without a record. The median: rare stalls do not count."""
        return median(self.steps) if self.steps else None

    def expected(self) -> tuple[float, float]:
        """When it usually comes next, and when it is late; both infinite and past without a record.

        Late is told from how much earlier than usual it sometimes comes: stalls only ever make a step longer.
        """
        usual = self.usual
        if usual is None or self.since is None:
            return float("inf"), float("-inf")
        return self.since + usual, self.since + usual + self._allowance(usual)

    @property
    def disturbance(self) -> float:
        """The chance that a step is late, by the record (Laplace's rule of succession: never 0, 1/2 without one)."""
        usual = self.usual
        late = 0 if usual is None else sum(s > usual + self._allowance(usual) for s in self.steps)
        return (late + 1) / (len(self.steps) + 2)

    def _allowance(self, usual: float) -> float:
        return max(SPREAD * usual, 2 * (usual - min(self.steps)))
