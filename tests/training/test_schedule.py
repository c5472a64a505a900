"""The learning rate over all rounds, worked by hand."""

from __future__ import annotations

import pytest

from facility.exchange.messages.settings import TrainingSettings
from facility.training.schedule import learning_rate, scheduled_step


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.939711, 0.775, 0.55, 0.325, 0.160289, 0.1]),
    ],
)
def test_it_rises_to_its_peak_and_is_at_its_least_in_the_last_step(schedule: str, rates: list[float]):
    settings = TrainingSettings(learning_rate=8e-3, warmup_steps=4, schedule=schedule, minimum_learning_rate_ratio=0.1)
    found = [learning_rate(step, 11, settings) / 8e-3 for step in range(11)]
    assert found == pytest.approx(rates, abs=1e-6)


def test_a_round_of_other_steps_passes_over_the_same_part():
    assert [scheduled_step(2, done, steps=10, planned=10) for done in (0, 3, 9.5)] == [20, 23, 29]
    assert [scheduled_step(2, done, steps=5, planned=10) for done in (0, 1, 4)] == [20, 22, 28]
    assert [scheduled_step(2, done, steps=20, planned=10) for done in (0, 1, 19)] == [20, 20, 29]
