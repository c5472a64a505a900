"""Laws of how far moments may be apart: the least cases, by hand."""

from __future__ import annotations

from coordinator.aggregation.moment_limits import LARGEST, agree, kept_by_all


def test_of_three_facilities_none_says_alone_how_much_is_left_and_of_two_the_larger_is_taken():
    assert kept_by_all([0.5, 0.25, 1.0]) == 0.5 and kept_by_all([0.5, 0.5, 0.0]) == 0.5
    assert kept_by_all([0.5, 1.0]) == 1.0 and kept_by_all([0.25]) == 0.25 and kept_by_all([]) == 0.0


def test_two_agree_up_to_the_limit_itself_and_not_where_one_returns_what_it_received():
    assert agree([1.0, LARGEST], 0.0, [0.0, 0.0]) and not agree([1.0, LARGEST * 1.01], 0.0, [0.0, 0.0])
    assert agree([2.0, 2.0], 4.0, [0.5, 0.5]), "neither added anything"
    assert not agree([2.0, 4.0], 4.0, [0.5, 1.0]), "of the second's gradients nothing is known"
    assert agree([0.0, 0.0], 0.0, [0.0, 0.0]) and not agree([0.0, 1.0], 0.0, [0.0, 0.0])
    assert not agree([0.25, 0.25], 0.25, [1.0, 1.0]), "nor of either's, however small what they received was"
