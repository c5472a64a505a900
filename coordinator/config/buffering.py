"""The `groups:` section of federation.yml."""

from __future__ import annotations

from facility.exchange.errors import ConfigurationError
from facility.exchange.scheduling.group import GroupLimits, GroupRules
from facility.exchange.validation import NonNegative, validated

WIDEST = 10.0
"""Maximum growth of a facility's window, as a multiple of `window_seconds`, while it aggregates alone."""


@validated(frozen=True, kw_only=True)
class GroupSettings(GroupLimits):
    """Buffered aggregation: groups of facilities average as updates arrive (`facility.exchange.scheduling.groups`)."""

    bound: NonNegative[int] = 3
    window_seconds: NonNegative[float] = 300.0
    """Initial time that the first update waits for more than `minimum`; it then adapts per facility: doubled after
    aggregating alone, up to ten times the initial time, and shortened by a tenth otherwise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.maximum == 1:
            raise ConfigurationError("maximum is 1, expected 0 (no limit) or 2 and more: alone there is no average")

    def as_rounds(self, rounds: int) -> str:
        """What comes nearest in rounds, as it would stand in federation.yml; docs/explanation/waiting.md says where
        it differs."""
        return f"rounds: {{count: {rounds}, quorum: {self.minimum}, grace: {self.window_seconds:g}, late: carry}}"

    def rules(self) -> GroupRules:
        """Rules for the scheduler. Raises `ConfigurationError` naming the field."""
        return GroupRules(
            **self.limits(),
            window_maximum_seconds=max(self.window_seconds * WIDEST, GroupRules.window_minimum_seconds),
        )
