"""What a coordinator that lies about survivors can reach: the formula against every lie; and what `auto` asks for."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from facility.exchange.masking.smallest_sum import least_for, smallest_sum


def reached(members: int, threshold: int, least: int) -> int:
    """Members of the smallest sum over all ways to tell each member who is absent."""
    sets = [set(one) for size in range(members - least + 1) for one in combinations(range(members), size)]
    smallest = members
    for told in product(sets, repeat=members):
        absences = [sum(one in absent for absent in told) for one in range(members)]
        out = [one for one in range(members) if absences[one] >= threshold]
        kept = [one for one in range(members) if members - absences[one] >= threshold]
        if len(out) + len(kept) == members:  # every mask of such a sum comes off
            smallest = min(smallest, len(kept))
    return smallest


@pytest.mark.parametrize(
    ("members", "threshold", "least"), [(3, 2, 2), (3, 2, 3), (4, 3, 3), (4, 3, 4), (4, 4, 4), (5, 3, 4), (5, 4, 4)]
)
def test_the_formula_is_what_the_best_lie_reaches(members: int, threshold: int, least: int):
    assert members - members * (members - least) // threshold == reached(members, threshold, least)
    assert smallest_sum(members, threshold, least) <= reached(members, threshold, least)


def test_of_five_with_sums_of_three_a_lie_reaches_two():
    """Members 0, 1, 2 are each absent in three of the five answers, two in an answer at most."""
    told = [{0, 1}, {0, 1}, {0, 2}, {1, 2}, {2}]
    absences = [sum(one in absent for absent in told) for one in range(5)]
    assert absences == [3, 3, 3, 0, 0] and smallest_sum(5, 3, 3) == 2


@pytest.mark.parametrize("facilities", range(3, 33))
def test_by_default_no_sum_of_two_is_within_reach_and_no_more_is_asked_than_that_takes(facilities: int):
    threshold = facilities // 2 + 1
    least = least_for(facilities, threshold)
    assert 3 <= least <= facilities and smallest_sum(facilities, threshold, least) >= 3
    assert least == 3 or smallest_sum(facilities, threshold, least - 1) < 3
