"""The smallest sum that a coordinator can open by showing facilities different sets of survivors.

Each of M members of a roster answers for one set, of `least` members or more, so it counts at most M - least as absent.
A member is left out of a sum only with `threshold` shares from answers that count it as absent. All answers together
allow for M (M - least) absences, so at most M (M - least) / threshold members are left out.
"""

from __future__ import annotations

OTHERS = 3
"""Members of a sum of which none can single another's update out by subtracting its own."""


def smallest_sum(facilities: int, threshold: int, least: int) -> int:
    """Members of the smallest sum within reach, over all rosters that these facilities can make.

    `least`: members of a set that a facility answers for.
    """
    asked = max(threshold, least)
    return min(members - members * (members - asked) // threshold for members in range(asked, facilities + 1))


def least_for(facilities: int, threshold: int) -> int:
    """The least set of survivors to answer for, so that no sum of fewer than `OTHERS` is within reach."""
    return next(
        least
        for least in range(OTHERS, facilities + 1)
        if smallest_sum(facilities, threshold, least) >= min(OTHERS, facilities)
    )
