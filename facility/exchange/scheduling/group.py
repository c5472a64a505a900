"""What a group of replicas is, and the rules by which one forms; the scheduler is in `groups`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypeVar

from facility.exchange.errors import ConfigurationError
from facility.exchange.validation import AtLeastOne, NonNegative, validated

Member: TypeAlias = int | str
AnyMember = TypeVar("AnyMember", bound=Member)


@validated(frozen=True, kw_only=True)
class GroupLimits:
    """How large groups are and how long they wait: the keys of `training.sync`."""

    bound: NonNegative[int] = 5
    """P: for N members, the union of groups is connected at least every P x N updates, and members that are ahead wait
    for that; 1: every group is all members; 0: no bound."""
    minimum: AtLeastOne[int] = 2
    """Fewest members of a group (fewer only when no other member can come); 1: a member whose window has passed
    proceeds alone."""
    maximum: NonNegative[int] = 0
    """Members of a group at most, except to keep the bound; 0: no limit."""
    window_seconds: NonNegative[float] = 0.001
    """How long a first arrival waits for more than `minimum`, at first; then it adapts, member by member: twice as long
    after a group that was too small, a tenth shorter after another."""

    def __post_init__(self) -> None:
        if 0 < self.maximum < self.minimum:
            raise ConfigurationError(
                f"maximum is {self.maximum}, expected 0 (no limit) or at least minimum, {self.minimum}"
            )

    def limits(self) -> dict[str, Any]:
        """These keys alone, by name."""
        return {field.name: getattr(self, field.name) for field in fields(GroupLimits)}


@validated(frozen=True, kw_only=True)
class GroupRules(GroupLimits):
    """How groups form."""

    patience: NonNegative[float] = 0.0
    """How long a member waits for others that are expected soon, by their record: this part of its usual step for each
    step that both are likely to make before one of them is late again. 0: the windows below are used. Members without
    a record wait by the windows in any case."""
    window_minimum_seconds: NonNegative[float] = 0.00001
    window_maximum_seconds: float = 0.01
    target: AtLeastOne[int] = 2
    """A member whose group was smaller doubles its window, otherwise the window shrinks by a tenth."""
    debias: bool = True
    """Weigh a member by mean rounds / own rounds, so that fast members do not dominate; else all equal."""
    debias_limit: AtLeastOne[float] = 4.0
    """No weight is above this or below its inverse."""
    relay: NonNegative[float] = 0.0
    """Name a `partner` to a group of whose members none was in a group before it: one of that group's members, which
    hands on what they left; as long as that takes no more than this part of a member's usual step. 0: never."""
    budget: NonNegative[int] = 0
    """Updates of all members together after which `stop` is set; 0: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_maximum_seconds < max(self.window_minimum_seconds, self.window_seconds):
            raise ConfigurationError(
                f"window_maximum_seconds is {self.window_maximum_seconds}, expected at least window_seconds "
                f"({self.window_seconds}) and window_minimum_seconds ({self.window_minimum_seconds})"
            )


def keeper_of(members: Sequence[AnyMember], returning: Sequence[AnyMember]) -> AnyMember:
    """The member that caches its group's gradient: the first that is up to date."""
    return next((m for m in members if m not in returning), members[0])


@dataclass(frozen=True, kw_only=True)
class Group:
    """A decision: these members average now."""

    number: int
    """Rises by one with every group; the order in which a member takes part in groups."""
    members: tuple[Member, ...]
    weights: tuple[float, ...]
    """Contribution of each member; they sum to 1. A member that came back has 0."""
    rounds: tuple[int, ...]
    """Updates each member has made so far."""
    staleness: tuple[int, ...]
    """Rounds that each member is behind the foremost of the group."""
    waits: tuple[float, ...]
    """Seconds since each member announced itself."""
    connected: bool
    """True if this group made the union of groups connected."""
    final: bool
    """The exact average over all that ends a phase."""
    reason: str
    returning: tuple[Member, ...] = ()
    """Members that came back and only receive this time."""
    together: int = 1
    """How many groups in a row these members have been in together, with no other member, this one included."""
    step_scale: float = 1.0
    """Mean rounds / own rounds (within the limit), on average over those that contribute; 1 without debiasing. A group
    that averages parameters equally and gradients by `weights` multiplies its common step by this: then every member's
    updates move the mean of all replicas by the same total."""
    partner: Member | None = None
    """Gossip: the peer whose parameters the single member asks for. Relay: the member that passes an earlier
    group's gradient on, to the first of `members`. Neither waits."""
    after: int = 0
    """Relay: number of the group that `partner` hands on."""

    @property
    def pairs(self) -> bool:
        """True if its only member averages parameters with `partner`."""
        return self.after > 0 and len(self.members) == 1

    @property
    def keeper(self) -> Member:
        """The member that caches the group's gradient for later groups."""
        return keeper_of(self.members, self.returning)

    def __len__(self) -> int:
        return len(self.members)
