"""A tree of coordinators gives the bits of one, whatever its shape and the order of arrival; and the right sum."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from facility.exchange.errors import InputError
from tests.reproductions.partial_sums import as_integers, as_step, in_a_tree, merged, unit_exponent

BOUND = 4.0
VALUES = st.floats(min_value=-BOUND, max_value=BOUND, width=32)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(VALUES, min_size=3, max_size=3), min_size=1, max_size=40),
    fan_in=st.integers(2, 7),
    data=st.data(),
)
def test_any_tree_and_any_order_give_the_bits_of_one_pass(rows: list[list[float]], fan_in: int, data: st.DataObject):
    weight, count = 1 / len(rows), len(rows)
    exponent = unit_exponent(BOUND, count)
    leaves = [as_integers(np.array(row, np.float32), weight, exponent, BOUND) for row in rows]
    flat = as_step(merged(leaves), exponent)
    shuffled = data.draw(st.permutations(leaves))
    assert as_step(in_a_tree(shuffled, fan_in), exponent).tobytes() == flat.tobytes()
    for place in range(3):
        exact = sum((Fraction(row[place]) * Fraction(weight) for row in rows), Fraction(0))
        # each step is rounded to a unit, after its product was rounded to a float64; the sum once to a float32
        allowed = count * (Fraction(2) ** exponent + Fraction(BOUND) / 2**52) + abs(exact) / 2**23
        assert abs(Fraction(float(flat[place])) - exact) <= allowed


def test_ten_thousand_facilities_in_trees_of_every_shape():
    draw, count = np.random.default_rng(0), 10_000
    weights = draw.dirichlet(np.ones(count))
    exponent = unit_exponent(BOUND, count)
    steps = draw.normal(0, 0.3, (count, 16)).astype(np.float32)
    leaves = [as_integers(step, float(w), exponent, BOUND) for step, w in zip(steps, weights, strict=True)]
    flat = as_step(merged(leaves), exponent)
    for fan_in in (2, 16, 100, 9_999):
        order = draw.permutation(count)
        assert as_step(in_a_tree([leaves[at] for at in order], fan_in), exponent).tobytes() == flat.tobytes()
    assert np.allclose(flat, (weights[:, None] * steps.astype(np.float64)).sum(0), rtol=2**-23, atol=1e-9)
    # what a mean of means in floating point does not give
    one = np.add.reduce(weights[:, None].astype(np.float32) * steps, axis=0)
    other = np.add.reduce((weights[:, None].astype(np.float32) * steps)[::-1], axis=0)
    assert one.tobytes() != other.tobytes()


def test_the_largest_sum_fits():
    count = 4096
    exponent = unit_exponent(BOUND, count)
    leaf = as_integers(np.array([BOUND, -BOUND]), 1.0, exponent, BOUND)
    total = in_a_tree([leaf] * count, 8)
    assert as_step(total, exponent, np.float64).tolist() == [BOUND * count, -BOUND * count]


@pytest.mark.parametrize("value", [np.nan, np.inf, 4.1])
def test_what_the_bound_does_not_cover_is_refused(value: float):
    with pytest.raises(InputError, match="bound of 4"):
        as_integers(np.array([0.0, value]), 1.0, unit_exponent(BOUND, 2), BOUND)


@pytest.mark.parametrize(("bound", "updates"), [(0.0, 1), (np.inf, 1), (1.0, 0)])
def test_a_unit_needs_a_bound_and_updates(bound: float, updates: int):
    with pytest.raises(InputError):
        unit_exponent(bound, updates)
