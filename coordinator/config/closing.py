"""How a round closes: with whom, after what wait, and what happens to updates that come later."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Gt, Lt

from facility.exchange.validation import AtLeastOne, NonNegative, validated

Part = Annotated[float, Gt(0), Lt(1)]


@validated(frozen=True, kw_only=True)
class ClosingSettings:
    """Part of `rounds:`, written as a mapping with `count`."""

    quorum: Literal["all"] | AtLeastOne[int] | Part = "all"
    """The grace begins once so many facilities have delivered: a number, a share below 1 of all, or `all`."""
    grace: Literal["auto"] | NonNegative[float] = "auto"
    """Seconds that a round stays open after the quorum; auto: what brought most useful tokens a second in the rounds
    so far (`coordinator.streamflow_plugin.grace`), no limit in the first two."""
    late: Literal["wait", "carry", "drop"] = "carry"
    """An update that is not there when a round closes: `carry` lets its job go on and averages it in a later round,
    at a weight of (1 + rounds late) ** -staleness_exponent; `drop` discards it; `wait` closes no round without it."""
    away: NonNegative[float] = 300.0
    """Most seconds that a round waits, after its quorum, for a facility that cannot be reached: it has no job yet, and
    begins a later round from the newest model."""

    def needed(self, facilities: int) -> int:
        """How many of so many facilities are the quorum."""
        if self.quorum == "all":
            return facilities
        if isinstance(self.quorum, int):
            return min(self.quorum, facilities)
        return max(1, -int(-self.quorum * facilities // 1))


@validated(frozen=True, kw_only=True)
class Rounds(ClosingSettings):
    """`rounds:` as a mapping."""

    count: AtLeastOne[int]
    """Rounds of the federation."""


def count_of(value: Any) -> Any:
    """The number of rounds, from either form of `rounds:`."""
    return value.get("count") if isinstance(value, dict) else value
