"""Laws of the share of a federation's weight that is present in a round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation.settings import AggregationSettings
from coordinator.archive.rounds import FacilityRow, RoundFile
from coordinator.rounds.presence import WINDOW, present_share

TOKENS = AggregationSettings(rule="mean")


def past(*rounds: dict[str, int]) -> list[RoundFile]:
    """Rounds by the tokens of each facility; 0: it was absent."""
    return [
        RoundFile(
            round=number,
            facilities=[
                FacilityRow(round=number, facility=name, status="ok" if tokens else "absent", tokens=tokens, samples=1)
                for name, tokens in one.items()
            ],
            global_loss=None,
            decision="go on",
        )
        for number, one in enumerate(rounds)
    ]


def test_an_absent_facility_weighs_what_its_last_update_did():
    history = past({"a": 100, "b": 300}, {"a": 100, "b": 50}, {"a": 100, "b": 0})
    assert present_share(history, {"a": 100.0}, ["a", "b"], TOKENS) == pytest.approx(2 / 3)
    assert present_share(history, {"a": 100.0, "b": 7.0}, ["a", "b"], TOKENS) == 1.0


def test_one_without_an_update_weighs_as_the_others_do():
    assert present_share([], {"a": 100.0, "b": 200.0}, ["a", "b", "c"], TOKENS) == pytest.approx(2 / 3)


def test_weights_of_the_settings_count_in_place_of_reports():
    history = past({"a": 100, "b": 300})
    equal = AggregationSettings(rule="mean", weights="equal")
    own = AggregationSettings(rule="mean", weights={"a": 4.0, "b": 1.0})
    assert present_share(history, {"a": 1.0}, ["a", "b"], equal) == 0.5
    assert present_share(history, {"a": 4.0}, ["a", "b"], own) == pytest.approx(0.8)


def test_updates_of_no_weight_are_left_to_be_refused():
    history = past({"a": 10, "b": 10, "c": 10**12})
    assert present_share([], {"a": 0.0}, ["a", "b"], TOKENS) == 1.0
    assert present_share(history, {"a": 0.0, "b": 0.0}, ["a", "b", "c"], TOKENS) == 0.5


def test_no_facility_takes_more_of_the_whole_than_the_largest_share():
    history = past({"a": 10, "b": 10, "c": 10**12})
    now = {"a": 10.0, "b": 10.0}
    assert present_share(history, now, ["a", "b", "c"], TOKENS) == pytest.approx(1 - TOKENS.maximum_share)


def test_one_that_is_there_takes_no_more_than_that_where_it_does_not_among_updates():
    history = past({"b": 10, "c": 10})
    three = present_share(history, {"a": 980.0}, ["a", "b", "c"], TOKENS)
    assert three == pytest.approx(TOKENS.maximum_share), "as its update is capped beside two others"
    assert present_share(history, {"a": 990.0}, ["a", "b"], TOKENS) == pytest.approx(0.99), "of two none is capped"
    assert present_share(history, {}, ["a", "b"], TOKENS) == 1.0, "a round without updates has no rate"


def test_an_absent_facility_of_two_takes_no_more_than_that_by_what_it_claimed():
    history = past({"a": 10, "b": 10**12})
    assert present_share(history, {"a": 10.0}, ["a", "b"], TOKENS) == pytest.approx(1 - TOKENS.maximum_share)
    agreed = AggregationSettings(rule="mean", weights={"a": 1.0, "b": 9.0})
    assert present_share(history, {"a": 1.0}, ["a", "b"], agreed) == pytest.approx(0.1)


def test_a_facility_that_stays_away_is_no_longer_waited_for():
    gone = [{"a": 1, "b": 1}] + [{"a": 1, "b": 0}] * (WINDOW - 1)
    shares = [present_share(past(*gone[:n]), {"a": 1.0}, ["a", "b"], TOKENS) for n in range(1, len(gone) + 1)]
    assert shares == [0.5] * (WINDOW - 1) + [1.0]
    back = past(*gone, {"a": 1, "b": 1})
    assert present_share(back, {"a": 1.0}, ["a", "b"], TOKENS) == 0.5
    assert present_share(past(*gone), {"a": 1.0}, ["a"], TOKENS) == 1.0  # it left the federation


weights = st.floats(1e-3, 1e9)


@given(present=st.lists(weights, min_size=1, max_size=6), absent=st.lists(st.integers(0, 10**9), max_size=6))
def test_it_is_a_share_that_falls_with_every_absence(present: list[float], absent: list[int]):
    now = {f"p{n}": weight for n, weight in enumerate(present)}
    away = {f"a{n}": tokens for n, tokens in enumerate(absent)}
    history = past(away)
    found = [present_share(history, now, [*now, *list(away)[:n]], TOKENS) for n in range(len(away) + 1)]
    assert found[0] == 1.0 and all(0 < share <= 1 for share in found)
    if all(absent) and len(now) + len(away) < TOKENS.screen.minimum_updates:
        assert all(later < before for before, later in zip(found, found[1:], strict=False))
    settings = AggregationSettings(rule="mean", maximum_share=1.0)
    uncapped = present_share(history, now, [*now, *away], settings)
    if all(absent):
        assert uncapped == pytest.approx(sum(present) / (sum(present) + sum(absent)))
