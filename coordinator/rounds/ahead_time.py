"""When to submit a facility's next job, ahead of its model: a pure function of what its queue and rounds took before.

A job submitted d seconds after the present one began to work, which then waits q in the queue, begins at d + q; its
model is there at b. With d + q <= b the whole wait is hidden and nodes wait for b - d - q, at most as long as the user
lets them; otherwise q - (d + q - b) of it is. b and q are random: every pair of what was seen counts alike, and of the
delays that cost no more node-seconds than allowed the one that hides most is chosen. This is the decision of a
newsvendor (Arrow, Harris and Marschak 1951, "Optimal Inventory Policy", Econometrica 19(3), section 2) with the
empirical distribution, too early and too late priced by a limit in place of a cost.

A few observations of a queue with a long tail promise less waiting than comes, the more so as the delay is chosen by
them. So what jobs did wait counts against what they may: of the share of all that they have worked, only what is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

WINDOW = 8
"""Latest observations of each kind that count."""
LEAST_SHARE = 0.01
"""Of the time from one training to the next: what hides less is not worth a second job in the queue."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was observed at one facility, in seconds, oldest first."""

    waits: Sequence[float] = ()
    """In the queue, of each job."""
    spans: Sequence[float] = ()
    """From when a job began to work until the next one had its model."""
    runs: Sequence[float] = ()
    """At work, of each job."""
    worked: float = 0.0
    """Seconds that all jobs together were at work."""
    lost: float = 0.0
    """In which all jobs together waited for their models."""

    def with_wait(self, seconds: float) -> Seen:
        return replace(self, waits=_latest(self.waits, seconds))

    def with_span(self, seconds: float) -> Seen:
        return replace(self, spans=_latest(self.spans, seconds))

    def with_run(self, seconds: float) -> Seen:
        return replace(self, runs=_latest(self.runs, seconds), worked=self.worked + max(0.0, seconds))

    def with_lost(self, seconds: float) -> Seen:
        return replace(self, lost=self.lost + max(0.0, seconds))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """When, and why."""

    after: float | None
    """Seconds after the present job began to work; inf: when it has ended; None: not at all, the next one is submitted
    with its model."""
    reason: str


def when_to_submit(seen: Seen, *, wait: float, idle: float) -> Choice:
    """The delay that hides most of the queue for at most the share `idle` of the time that jobs work.

    `wait`: seconds after which a job that has begun ends without its model.
    """
    waits, spans, runs = (list(one)[-WINDOW:] for one in (seen.waits, seen.spans, seen.runs))
    if not waits or not spans or not runs:
        return Choice(after=math.inf, reason="when this one has ended: how long rounds take is not known yet")
    usual = fmean(runs)
    allowed = min(idle * usual, max(0.0, idle * (seen.worked + usual) - seen.lost))
    best, hides = max(spans), 0.0
    for after in sorted({0.0, *(max(0.0, span - one) for span in spans for one in waits)}):
        hidden, lost = expected(after, waits, spans, wait=wait)
        if lost <= allowed + 1e-9 and hidden >= hides:
            best, hides = after, hidden
    between = median(spans) + median(waits)
    if hides < LEAST_SHARE * between:
        return Choice(
            after=None,
            reason=f"not at all: of {median(waits):.0f} s in the queue (median) it would hide {hides:.1f} s of the "
            f"{between:.0f} s from one training to the next",
        )
    return Choice(
        after=best,
        reason=f"{best:.0f} s after this one has begun: of {median(waits):.0f} s in the queue (median) that hides "
        f"{hides:.0f} s",
    )


def expected(after: float, waits: Sequence[float], spans: Sequence[float], *, wait: float) -> tuple[float, float]:
    """Mean seconds of the queue that are hidden, and mean seconds that a job waits, over all pairs of what was seen."""
    pairs = [_one(after, one, span, wait) for one in waits for span in spans]
    return fmean(hidden for hidden, _ in pairs), fmean(lost for _, lost in pairs)


def _one(after: float, queued: float, span: float, wait: float) -> tuple[float, float]:
    early = span - after - queued
    if early > wait:
        return 0.0, wait  # it ends without its model
    if early >= 0:
        return queued, early
    return max(0.0, span - after), 0.0


def _latest(values: Sequence[float], one: float) -> list[float]:
    return [*values, max(0.0, one)][-WINDOW:]
