"""The `groups:` section of federation.yml."""

from __future__ import annotations

from facility.exchange.errors import ConfigurationError
from facility.exchange.scheduling.group import GroupLimits, GroupRules
from facility.exchange.validation import NonNegative, validated

WIDEST = 10.0
"""A facility's window grows to at most so many times `window_seconds` while it comes alone."""


@validated(frozen=True, kw_only=True)
class GroupSettings(GroupLimits):
    """Groups in place of rounds: facilities average as their updates arrive, by `facility.exchange.scheduling.groups`."""

    bound: NonNegative[int] = 3
    window_seconds: NonNegative[float] = 300.0
    """How long the first to arrive waits for more than `minimum`, at first; then it adapts, facility by facility: twice as
    long for one that came alone, up to ten times, a tenth shorter for one that did not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.maximum == 1:
            raise ConfigurationError("maximum is 1, expected 0 (no limit) or 2 and more: alone there is no average")

    def rules(self) -> GroupRules:
        """As the scheduler is told. Raises `ConfigurationError` naming the field."""
        return GroupRules(
            **self.limits(),
            window_maximum_seconds=max(self.window_seconds * WIDEST, GroupRules.window_minimum_seconds),
        )
