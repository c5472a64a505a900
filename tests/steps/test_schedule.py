"""The server learning rate over the rounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.steps.schedule import decay_factor


def test_ten_rounds_of_which_the_last_four_decay():
    # left 3, 2, 1, 0 of 4: 0.6 + 0.4 * left / 4
    found = [decay_factor(number, 10, share=0.4, to=0.6) for number in range(10)]
    assert found == pytest.approx([1] * 6 + [0.9, 0.8, 0.7, 0.6])


@given(rounds=st.integers(1, 60), share=st.floats(0, 1), to=st.floats(0.01, 1), data=st.data())
def test_the_rate_never_rises_and_ends_where_it_was_told_to(rounds: int, share: float, to: float, data: st.DataObject):
    found = [decay_factor(number, rounds, share=share, to=to) for number in range(rounds)]
    assert all(later <= before + 1e-12 for before, later in zip(found, found[1:], strict=False))
    assert all(to - 1e-12 <= factor <= 1 for factor in found)
    assert found[-1] == pytest.approx(to if round(share * rounds) else 1.0)
    assert sum(factor < 1 for factor in found) <= round(share * rounds)
