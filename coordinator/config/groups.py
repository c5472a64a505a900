"""The `groups:` section that CrossFed 0.1 read, deprecated: mapped onto `rounds:`, or refused where nothing is alike.

docs/explanation/waiting.md says in what the two differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coordinator.aggregation.settings import AUTO
from facility.exchange.errors import ConfigurationError
from facility.exchange.scheduling.group import GroupLimits
from facility.exchange.validation import NonNegative, parse_dataclass, validated

KEY = "groups"


@validated(frozen=True, kw_only=True)
class GroupSettings(GroupLimits):
    """What the section could hold."""

    bound: NonNegative[int] = 3
    window_seconds: NonNegative[float] = 300.0


def without_groups(data: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """federation.yml's data with what comes nearest in place of `groups:`, and the sentence that says so.

    Data without the section stays as it is, and the sentence is empty. Raises `ConfigurationError`, with the key, for
    what has no counterpart.
    """
    if data.get(KEY) is None:
        return {name: value for name, value in data.items() if name != KEY}, ""
    groups = parse_dataclass(GroupSettings, data[KEY], where=KEY)
    facilities = len(data["facilities"])
    _check(groups, data, facilities)
    changes = _counterpart(groups, data, facilities)
    replacement = "; ".join(f"`{name}: {_shown(value)}`" for name, value in changes.items())
    kept = {name: value for name, value in data.items() if name != KEY}
    return kept | changes, f"groups is deprecated and read as {replacement}: write that in its place"


def _check(groups: GroupSettings, data: Mapping[str, Any], facilities: int) -> None:
    if facilities < 2:
        raise _error("", f"groups needs two facilities or more, found {facilities}: leave it out or add a facility")
    if groups.minimum > facilities:
        raise _error("minimum", f"groups.minimum is {groups.minimum}, expected 1 to {facilities} (the facilities)")
    if groups.maximum:
        raise _error(
            "maximum",
            f"groups.maximum is {groups.maximum}: a round has one model, and whatever has arrived goes into it, and "
            "what is left for another group would need a model of its own. Remove it (`rounds.quorum` is the minimum)",
        )
    if isinstance(data.get("rounds"), dict):
        raise _error(
            "", "rounds is a mapping and there are groups: a quorum with `late: carry` is the same; remove `groups`"
        )


def _counterpart(groups: GroupSettings, data: Mapping[str, Any], facilities: int) -> dict[str, Any]:
    """Keys of federation.yml in place of the section's."""
    quorum: int | str = "all" if groups.bound == 1 else groups.minimum
    rounds: dict[str, Any] = {"count": data.get("rounds"), "quorum": quorum, "grace": groups.window_seconds}
    changes: dict[str, Any] = {"rounds": rounds | {"late": "carry", "late_weight": "participation"}}
    early = groups.bound > 1 and groups.minimum < facilities
    if early and "keep_rounds" not in data:  # P updates of each facility, `minimum` or more in a round
        changes["keep_rounds"] = groups.bound * -(-facilities // groups.minimum) + 1
    aggregation = data.get("aggregation") or {}
    if isinstance(aggregation, dict) and aggregation.get("rule", AUTO) == AUTO:
        changes["aggregation"] = aggregation | {"rule": "mean"}
    return changes


def _shown(value: Any) -> str:
    """As YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shown(one)}" for name, one in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)


def _error(key: str, message: str) -> ConfigurationError:
    return ConfigurationError(message, key=f"{KEY}.{key}" if key else KEY)
