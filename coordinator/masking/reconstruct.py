"""From the facilities' answers to the seeds that take the masks off a sum; wrong shares are found and attributed.

Every seed has a commitment by the facility whose seed it is. Shares that do not give what was committed to are tried
in other combinations of `threshold`. A share that does not lie on the polynomial is not used; whose it is, is tried
last from then on, but not left out: whoever made the seed may have sealed a wrong share for an honest facility.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations, islice

from facility.exchange.errors import InputError
from facility.exchange.masking.roster import Roster
from facility.exchange.masking.shamir import interpolate
from facility.exchange.masking.shares import OWN, Shares, commit_to_seed
from facility.exchange.masking.streams import SEED_BYTES
from facility.exchange.masking.unmasking import Answer, asked_of

MOST_COMBINATIONS = 20_000


@dataclass(kw_only=True)
class Seeds:
    """What was found out."""

    streams: list[tuple[int, bytes]] = field(default_factory=list)
    """1 or -1, and the seed: what is to be added to the sum of the masked updates."""
    liars: dict[str, str] = field(default_factory=dict)
    """Facilities whose answers hold a wrong share, with whose seed it is: the one or the other is to blame."""


def reconstruct(roster: Roster, survivors: Mapping[str, Shares], answers: Mapping[str, Answer]) -> Seeds:
    """Raises `InputError` where fewer than the threshold have answered, or a facility's shares cannot be its seeds'."""
    threshold = roster.agreement.threshold
    if len(answers) < threshold:
        missing = ", ".join(sorted(set(roster.keys) - set(answers))) or "nobody"
        raise InputError(
            f"{len(answers)} facilities answered, {threshold} are needed to take the masks off; no answer from: "
            f"{missing}"
        )
    seeds = Seeds()
    absent = asked_of(sorted(survivors), roster.keys)
    for name, shares in sorted(survivors.items()):
        seeds.streams.append((-1, _seed(roster, shares, OWN, answers, seeds)))
        for other in absent[name]:
            added = name < other  # by the survivor, when it masked
            seeds.streams.append((-1 if added else 1, _seed(roster, shares, other, answers, seeds)))
    return seeds


def _seed(roster: Roster, shares: Shares, other: str, answers: Mapping[str, Answer], seeds: Seeds) -> bytes:
    """One seed of the facility of `shares`: its own (`OWN`), or that which it has in common with `other`."""
    given = {
        roster.point(facility): share
        for facility, answer in sorted(answers.items())
        if (share := _share(answer, shares.facility, other)) is not None
    }
    ordered = sorted(given, key=lambda point: (roster.members[point - 1] in seeds.liars, point))
    threshold, wanted = roster.agreement.threshold, shares.commitments[other]
    for points in islice(combinations(ordered, threshold), MOST_COMBINATIONS):
        chosen = {point: given[point] for point in points}
        seed = interpolate(chosen)
        if commit_to_seed(roster.digest, shares.facility, other, seed) == wanted:
            for point in sorted(set(given) - set(points)):
                if interpolate(chosen, at=point) != given[point]:
                    maker = shares.facility
                    seeds.liars[roster.members[point - 1]] = (
                        f"its share of a seed of {maker!r} is wrong: it lies, or {maker!r} sealed a wrong one for it"
                    )
            return seed
    raise InputError(
        f"the {len(given)} shares that came of a seed of {shares.facility!r} do not give what it committed to "
        f"(threshold {threshold}): either its own shares are wrong, or too many answers are; without it "
        "the sum cannot be unmasked"
    )


def _share(answer: Answer, facility: str, other: str) -> bytes | None:
    text = answer.own.get(facility) if other == OWN else answer.pairs.get(facility, {}).get(other)
    share = bytes.fromhex(text) if text is not None else b""
    return share if len(share) == SEED_BYTES else None
