"""Law: whatever happened before, the last planned release ends within the stated budget, or none is made."""

from __future__ import annotations

import pytest

from facility.exchange.messages.privacy import DifferentialSettings
from facility.exchange.privacy.accounting import Releases, epsilon_of
from facility.training.privacy.budget import OutOfBudget, choose_noise
from tests.cases import slow_but

SETTINGS = DifferentialSettings(epsilon=3.0, delta=1e-5)
RATE, PLANNED = 0.02, 60
NOISE = 0.72744
"""What the plan needs."""


def choose(before: list[Releases], left: int) -> float:
    return choose_noise(SETTINGS, before, planned=PLANNED, left=left, sampling_rate=RATE, what="steps")


def choose_within(epsilon: float, before: list[Releases], planned: int, left: int) -> float:
    settings = DifferentialSettings(epsilon=epsilon, delta=1e-5)
    return choose_noise(settings, before, planned=planned, left=left, sampling_rate=RATE, what="steps")


def steps(count: int, noise: float) -> Releases:
    return Releases(count=count, noise_multiplier=noise, sampling_rate=RATE)


@pytest.mark.slow
def test_without_a_crash_the_noise_stays_and_the_end_is_the_stated_epsilon():
    noise = choose([], PLANNED)
    assert choose([steps(20, noise)], 40) == noise
    assert choose([steps(59, noise)], 1) == noise
    assert 0.99 * SETTINGS.epsilon < epsilon_of([steps(PLANNED, noise)], SETTINGS.delta) <= SETTINGS.epsilon


@pytest.mark.slow
def test_steps_that_are_made_again_are_paid_for_by_those_to_come():
    noise = choose([], PLANNED)
    before = [steps(30, noise)]  # of which ten were lost
    more = choose(before, 40)
    assert noise < more < 1.3 * noise
    assert epsilon_of([*before, steps(40, more)], SETTINGS.delta) <= SETTINGS.epsilon
    assert epsilon_of([*before, steps(40, noise)], SETTINGS.delta) > SETTINGS.epsilon


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epsilon", "planned", "left"),
    [(6.0, PLANNED, 40), (SETTINGS.epsilon, 30, 10)],
    ids=["a larger epsilon", "fewer rounds"],
)
def test_what_a_changed_plan_leaves_over_pays_for_the_steps_to_come(epsilon: float, planned: int, left: int):
    """They kept the noise of the plan before, so that the larger budget bought nothing."""
    before = [steps(20, NOISE)]
    less = choose_within(epsilon, before, planned, left)
    assert less < 0.95 * NOISE
    assert 0.99 * epsilon < epsilon_of([*before, steps(left, less)], SETTINGS.delta) <= epsilon
    assert choose_within(epsilon, [*before, steps(left // 2, less)], planned, left - left // 2) == less


@pytest.mark.parametrize("before", slow_but([90], [60, 90]))
def test_a_spent_budget_releases_nothing_more(before: int):
    with pytest.raises(OutOfBudget, match=r"60 steps have|90 steps have") as caught:
        choose([steps(before, choose([], PLANNED))], 20)
    assert "of 3 (delta 1e-05), and 20 more do not fit" in str(caught.value)


ORDERS = {
    "rewound to the middle": [(60, 40, RATE), (40, 40, RATE), (40, 40, RATE)],
    "told one round after the other that it is the last": [(10, 10, RATE)] * 2,
    "with other batches": [(60, 30, RATE), (30, 30, 5 * RATE)],
    "rounds of unlike steps": [(60, 15, RATE), (180, 60, RATE), (8, 4, RATE), (40, 40, RATE)],
}
"""Steps that are left by the settings of an attempt, those of them that it takes, and its sampling rate."""


LONG = ("rewound to the middle", "rounds of unlike steps", "with other batches")
"""Orders whose accounts take seconds to work out."""


@pytest.mark.parametrize("order", [pytest.param(o, marks=pytest.mark.slow) if o in LONG else o for o in ORDERS])
def test_in_whatever_order_a_coordinator_asks_the_budget_is_spent_once(order: str):
    """The ledger stays at the facility: a rewound federation has given away what it gave away."""
    before: list[Releases] = []
    taken = 0
    for left, done, rate in ORDERS[order]:
        try:
            noise = choose_noise(SETTINGS, before, planned=PLANNED, left=left, sampling_rate=rate, what="steps")
        except OutOfBudget:
            continue
        before.append(Releases(count=done, noise_multiplier=noise, sampling_rate=rate))
        taken += 1
        assert epsilon_of(before, SETTINGS.delta) <= SETTINGS.epsilon
    assert 0 < taken and epsilon_of(before, SETTINGS.delta) > 0
