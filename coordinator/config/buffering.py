"""The `groups:` section of federation.yml."""

from __future__ import annotations

from facility.exchange.errors import ConfigurationError
from facility.exchange.scheduling.group import GroupRules
from facility.exchange.validation import AtLeastOne, NonNegative, validated

WIDEST = 10.0
"""A facility's window grows to at most so many times `window_seconds` while it comes alone."""


@validated(frozen=True, kw_only=True)
class GroupSettings:
    """Groups in place of rounds: facilities average as their updates arrive, by `facility.exchange.scheduling.groups`."""

    bound: NonNegative[int] = 3
    """P: the groups connect all facilities at least once in P x N updates, and those that are ahead wait for that; 1: every
    group is everybody; 0: no bound."""
    minimum: AtLeastOne[int] = 2
    """Facilities of a group at least; who is alone waits for the next one, unless nobody else can come. 1: it goes on
    alone when its window has passed."""
    maximum: NonNegative[int] = 0
    """Facilities of a group at most, except to keep the bound; 0: no limit."""
    window_seconds: NonNegative[float] = 300.0
    """How long the first to arrive waits for more than `minimum`, at first; then it adapts, facility by facility: twice as
    long for one that came alone, up to ten times, a tenth shorter for one that did not."""

    def __post_init__(self) -> None:
        self.rules()
        if self.maximum == 1:
            raise ConfigurationError("maximum is 1, expected 0 (no limit) or 2 and more: alone there is no average")

    def rules(self) -> GroupRules:
        """As the scheduler is told. Raises `ConfigurationError` naming the field."""
        return GroupRules(
            bound=self.bound,
            minimum=self.minimum,
            maximum=self.maximum,
            window_seconds=self.window_seconds,
            window_maximum_seconds=max(self.window_seconds * WIDEST, GroupRules.window_minimum_seconds),
        )
