"""Plans the next mean walk (SCAFFOLD's server control variate) from the last one and the updates of the round.

With a the mean walk as it was sent and a_i the walk of facility i in it, a corrected update's step d_i over the sum of
its learning rates r_i is w_i + a - a_i, where w_i is its new walk; an update without a correction gives w_i alone. So

    mean' = mean + sum of weight_i (d_i / r_i - a) over the corrected ones + sum of weight_j d_j / r_j over new ones

keeps the exact mean, each walk with the weight that its facility had beside the others when it joined, and the
coordinator needs to know no facility's walk (SCAFFOLD, arXiv 1910.06378, algorithm 1, lines 16 and 17). Facilities that
are absent or late stay in the mean with their last walk. Where a facility has lost its own walk, or has left the
federation, the mean starts again from zero: the walk of one that has left would move all others by the same vector for
ever, since nobody is corrected by it.

Every facility is moved by the mean, whatever the clipping of steps makes of its own. So a step that is far longer over
its learning rates than the median one is not counted; and each facility compares the correction with its own walk
(`facility.training.drift`), since one that lies can add to the mean round by round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from coordinator.aggregation.updates import Update
from facility.exchange.errors import CheckpointError
from facility.exchange.json_text import parse_values
from facility.exchange.messages.drift import DriftReport, drift_of

WEIGHTS = "weights"
LEAST_RATES = 0.05
"""An update whose learning rates sum up to less than this share of the median is not counted: its walk would be its
step many times over."""
ANEW = "the mean walk begins anew after the next round"
LONGEST_WALK = 3.0
"""Times the median of steps over learning rates: what is longer is not counted, for it would steer the others."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """The facilities whose walks the mean holds."""

    rounds: Mapping[str, int] = field(default_factory=dict)
    """The round that each facility's walk is of."""
    weights: Mapping[str, float] = field(default_factory=dict)

    def metadata(self) -> dict[str, str]:
        """As it is kept at the coordinator."""
        return {"format": "pt", WEIGHTS: json.dumps(dict(sorted(self.weights.items())))}


@dataclass(frozen=True, kw_only=True)
class WalkPlan:
    """How the next mean walk is made: mean' = kept mean - sent a + sum of coefficients d."""

    kept: float
    sent: float
    coefficients: list[float]
    """Of each update's step; 0: not counted."""
    members: Members
    """Of the next mean; none: no mean is sent."""
    reason: str

    @property
    def makes_mean(self) -> bool:
        return bool(self.members.rounds)


def weights_in(metadata: Mapping[str, str]) -> dict[str, float]:
    """The members' weights that the coordinator keeps with the mean. Raises `CheckpointError`."""
    try:
        found = parse_values(metadata.get(WEIGHTS, "{}"))
        return {str(name): float(weight) for name, weight in found.items()}
    except (ValueError, TypeError, AttributeError):
        raise CheckpointError(f"the mean walk's {WEIGHTS} are not a number by facility") from None


def plan_walk(
    updates: Sequence[Update],
    shares: Sequence[float],
    members: Members,
    *,
    number: int,
    norms: Sequence[float] | None = None,
    facilities: Collection[str] | None = None,
) -> WalkPlan | None:
    """The plan for round `number`; None where no update reports a walk.

    `shares`: of the updates in the round; `norms`: L2 norms of their steps, where they are known by now; `facilities`:
    all of the federation, None where nobody says.
    """
    reports = [drift_of(update.report) if update.staleness == 0 else None for update in updates]
    if not any(reports):
        return _as_it_was(updates, members, facilities)
    middle = median(one.rates for one in reports if one is not None)
    counted = [one if one is not None and one.rates >= LEAST_RATES * middle else None for one in reports]
    if norms is not None:
        counted = _of_usual_length(counted, norms)
    nothing = WalkPlan(kept=0.0, sent=0.0, coefficients=[0.0] * len(updates), members=Members(), reason="")
    if reason := _left(members, facilities) or _contradiction(updates, reports, counted, members):
        return WalkPlan(**vars(nothing) | {"reason": f"{reason}: {ANEW}"})
    pairs = [(update.facility, share) for update, share in zip(updates, shares, strict=True)]
    weights, scale = dict(members.weights), _scale(pairs, members)
    for (name, share), one in zip(pairs, counted, strict=True):
        if one is not None and share > 0:
            weights.setdefault(name, share * scale)
    total = math.fsum(weights.values())
    if not total:
        return WalkPlan(**vars(nothing) | {"reason": "no update counts"})
    coefficients = [
        weights[name] / (total * one.rates) if one is not None and name in weights else 0.0
        for (name, _), one in zip(pairs, counted, strict=True)
    ]
    fresh = {name: number for (name, _), factor in zip(pairs, coefficients, strict=True) if factor}
    sent = math.fsum(weights[name] for name in fresh if name in members.rounds)
    return WalkPlan(
        kept=math.fsum(members.weights.values()) / total,
        sent=sent / total,
        coefficients=coefficients,
        members=Members(rounds=dict(members.rounds) | fresh, weights=weights),
        reason=f"the mean walk holds {len(weights)} facilities, {len(fresh)} of this round",
    )


def _as_it_was(updates: Sequence[Update], members: Members, facilities: Collection[str] | None) -> WalkPlan | None:
    """The plan of a round whose updates are all late, which keeps the last mean; None where no update reports a walk,
    or there is no mean."""
    if not members.rounds or not all(update.staleness and drift_of(update.report) for update in updates):
        return None
    none = [0.0] * len(updates)
    if reason := _left(members, facilities):
        return WalkPlan(kept=0.0, sent=0.0, coefficients=none, members=Members(), reason=f"{reason}: {ANEW}")
    held = f"the mean walk holds {len(members.rounds)} facilities, 0 of this round"
    return WalkPlan(kept=1.0, sent=0.0, coefficients=none, members=members, reason=held)


def _scale(pairs: Sequence[tuple[str, float]], members: Members) -> float:
    """What a new facility's share is multiplied by, so that it counts beside the members as it does in the round."""
    known = [(members.weights[name], share) for name, share in pairs if name in members.weights and share > 0]
    if known:
        return math.fsum(weight for weight, _ in known) / math.fsum(share for _, share in known)
    if not members.weights:
        return 1.0
    middle = math.fsum(members.weights.values()) / len(members.weights)
    return middle * len(pairs) / math.fsum(share for _, share in pairs)


def _of_usual_length(counted: Sequence[DriftReport | None], norms: Sequence[float]) -> list[DriftReport | None]:
    """Without those whose step over its learning rates is far longer than the median one."""
    lengths = [norm / one.rates if one is not None else None for one, norm in zip(counted, norms, strict=True)]
    found = [length for length in lengths if length is not None]
    longest = LONGEST_WALK * median(found) if found else 0.0
    return [
        one if length is not None and length <= longest else None for one, length in zip(counted, lengths, strict=True)
    ]


def _left(members: Members, facilities: Collection[str] | None) -> str:
    """Who of the mean has left the federation, as a sentence; empty: nobody."""
    gone = sorted(set(members.rounds) - set(facilities)) if facilities is not None else []
    return f"{', '.join(gone)} left the federation" if gone else ""


def _contradiction(
    updates: Sequence[Update],
    reports: Sequence[DriftReport | None],
    counted: Sequence[DriftReport | None],
    members: Members,
) -> str:
    """Why the mean cannot go on from the last one; empty: it can."""
    for update, one, used in zip(updates, reports, counted, strict=True):
        if one is None:
            continue
        if used is not None and one.corrected != (update.facility in members.rounds):
            was = "corrected" if one.corrected else "not corrected"
            return f"{update.facility} was {was}, and the mean says otherwise"
    return ""
