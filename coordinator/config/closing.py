"""How a round closes: with which facilities, after which wait, and what happens to updates that come later."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator

from facility.exchange.errors import ConfigurationError
from facility.exchange.text import Line
from facility.exchange.validation import AtLeastOne, NonNegative, validated

LONGEST_QUEUE_HOURS = 168.0
DIGITS = 9
"""After the point, of a share times a number: 0.28 of 25 is 7 but for its last bit."""

MOST_LATE = 8
"""Rounds that a carried update may be late where the archive keeps all models."""

Part = Annotated[float, Gt(0), Lt(1)]


@validated(frozen=True, kw_only=True)
class ClosingSettings:
    """Part of `rounds:`, written as a mapping with `count`."""

    quorum: Literal["all"] | AtLeastOne[int] | Part = "all"
    """The grace begins once this many facilities have delivered: a number, a share below 1 of all, or `all`."""
    grace: Literal["auto"] | NonNegative[float] = "auto"
    """Seconds that a round stays open after the quorum; auto: what brought most useful tokens a second in the rounds
    so far (`coordinator.streamflow_plugin.grace`), no limit in the first two."""
    late: Literal["wait", "carry", "drop"] = "carry"
    """An update that is not there when a round closes: `carry` lets its job go on and averages it in a later round,
    at the weight that `late_weight` says; `drop` discards it; `wait` closes no round without it."""
    late_weight: Literal["staleness", "participation"] = "participation"
    """What an update counts beside `aggregation.weights`: `participation`, the mean share of rounds in which facilities
    have delivered over its own facility's share, between 1/4 and 4, so that those that deliver often do not dominate;
    `staleness`, (1 + rounds late) ** -staleness_exponent."""
    away: NonNegative[float] = 300.0
    """Most seconds that a round waits, after its quorum or once all others have ended, for a facility that cannot be
    reached: it has no job yet, and begins a later round from the newest model."""

    def needed(self, facilities: int) -> int:
        """Facilities that are the quorum of `facilities`."""
        if self.quorum == "all":
            return facilities
        if isinstance(self.quorum, int):
            return min(self.quorum, facilities)
        return max(1, math.ceil(round(self.quorum * facilities, DIGITS)))


def carries_late(closing: ClosingSettings | None) -> bool:
    """True if updates are averaged in a later round than they were made for."""
    return closing is not None and closing.late == "carry"


def _as_text(value: Any) -> Any:
    """YAML reads a time with seconds as a time."""
    return str(value) if hasattr(value, "isoformat") else value


@validated(frozen=True, kw_only=True)
class LimitSettings:
    """Part of `rounds:`: when the federation ends, in order, at the best model so far."""

    deadline: Annotated[Line, BeforeValidator(_as_text, json_schema_input_type=str)] = ""
    """No round is begun that is expected to end later, `2026-12-24 18:00` in the coordinator's time zone or with one
    of its own (`+01:00`); empty: none. The expected time is the median of the last five rounds."""
    node_hours: NonNegative[float] = 0.0
    """Node-hours, of all facilities together, that the federation may use: no round is begun that is expected to use,
    with the final evaluation, more than is left, by what the jobs of the last five reported; 0: no limit."""

    def __post_init__(self) -> None:
        try:
            self.seconds_until(0.0)
        except ValueError:
            raise ConfigurationError(
                f"deadline is {self.deadline!r}, expected a time such as 2026-12-24 18:00", key="deadline"
            ) from None

    def seconds_until(self, now: float) -> float:
        """Seconds from `now`, seconds since 1970, to the deadline; inf without one."""
        return datetime.fromisoformat(self.deadline).timestamp() - now if self.deadline else float("inf")


@validated(frozen=True, kw_only=True)
class EvenSettings:
    """Part of `rounds:`: how many steps each facility takes in a round."""

    steps: Literal["fixed", "auto", "elastic"] = "fixed"
    """`auto`: with every round the steps that let all facilities end together, by their measured speed, queue and
    transfers; as many samples in all as `training.steps` asks for, which the learning rate's schedule follows too.
    `elastic`: the same, but each job decides when it begins, from the time that is left until the round is expected to
    end: one that left its queue early takes more steps, one that was held there fewer (`coordinator.steps.elastic`).
    With both an update weighs by its tokens over the work of all rounds (`coordinator.rounds.participation`)."""
    least_steps: Annotated[float, Gt(0), Le(1)] = 0.25
    """With `steps: auto` and `elastic`: fewest steps of a round, as a share of a facility's `training.steps`."""
    most_steps: Annotated[float, Ge(1)] = 4.0
    """With `steps: auto` and `elastic`: most steps of a round, as a multiple of a facility's `training.steps`."""

    def bounds(self, steps: int) -> tuple[int, int]:
        """Fewest and most for a facility whose settings ask for `steps`."""
        return max(1, math.ceil(steps * self.least_steps)), max(1, math.floor(steps * self.most_steps))


@validated(frozen=True, kw_only=True)
class Rounds(ClosingSettings, LimitSettings, EvenSettings):
    """`rounds:` as a mapping."""

    count: AtLeastOne[int]
    """Rounds of the federation."""
    longest_queue_hours: NonNegative[float] = LONGEST_QUEUE_HOURS
    """A job that its queue reports as waiting for longer is cancelled, and its facility is absent from the round; the
    next round submits a new one. 168 is a week; 0: no limit."""


def count_of(value: Any) -> Any:
    """The number of rounds, from either form of `rounds:`."""
    return value.get("count") if isinstance(value, dict) else value
