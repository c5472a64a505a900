"""Stopping rules, by hand-made histories."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np
import pytest

from coordinator.config.closing import ClosingSettings
from coordinator.config.privacy import PrivacySettings
from coordinator.config.settings import CoordinatorSettings, StopSettings
from coordinator.steps.decide import decide, decide_after
from facility.exchange.messages.privacy import DifferentialSettings


def settings(rounds: int = 10, **stop: float) -> CoordinatorSettings:
    return CoordinatorSettings(federation="f", rounds=rounds, facilities=["a"], stop=StopSettings(**stop))  # type: ignore[arg-type]


def test_goes_on_until_the_last_round():
    assert decide(settings(3), [3.0, 2.5]).proceed
    last = decide(settings(3), [3.0, 2.5, 2.0])
    assert not last.proceed and not last.broken and "all 3 rounds" in last.reason
    assert decide(settings(1), [3.0]).reason == "the only round is done"


def test_stops_at_the_target_perplexity():
    assert decide(settings(target_perplexity=7.0), [math.log(7.1)]).proceed
    reached = decide(settings(target_perplexity=7.0), [math.log(7.1), math.log(6.9)])
    assert not reached.proceed and not reached.broken and "target" in reached.reason


def test_patience_counts_rounds_without_a_better_loss():
    assert decide(settings(patience=2), [3.0, 2.0, 2.1]).proceed
    assert not decide(settings(patience=2), [3.0, 2.0, 2.1, 2.0]).proceed
    assert decide(settings(patience=2), [3.0, 2.0, 2.1, 1.9]).proceed
    assert "for 1 round (" in decide(settings(patience=1), [2.0, 2.1]).reason


def test_divergence_is_broken():
    assert decide(settings(divergence=1.0), [3.0, 2.0, 2.9]).proceed
    diverged = decide(settings(divergence=1.0), [3.0, 2.0, 3.1])
    assert diverged.broken and not diverged.proceed
    assert decide(settings(divergence=0.0), [2.0, 9.0]).proceed, "off"
    lost = decide(settings(), [3.0, math.nan])
    assert lost.broken and not lost.proceed


@pytest.mark.parametrize("first", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_none_is_never_the_best(first: float):
    """Of a federation that went on after it."""
    assert decide(settings(patience=2, divergence=1.0), [first, 3.0, 2.5]).proceed
    assert not decide(settings(patience=2), [first, 2.0, 3.0, 2.5]).proceed


def test_rounds_that_told_nothing_do_not_decide():
    assert decide(settings(patience=5, target_perplexity=2.0), [None, 3.0, None]).proceed


@pytest.mark.parametrize(("late", "proceeds"), [("carry", True), ("drop", False)])
def test_patience_waits_for_figures_that_come_late(late: Literal["carry", "drop"], proceeds: bool):
    """Where updates are carried, the newest rounds' figures are still to come; elsewhere they never will."""
    asked = dataclasses.replace(settings(patience=2), closing=ClosingSettings(quorum=1, late=late))
    assert decide_after(asked, [{"a": 3.0, "b": 3.1}, {"a": 2.0, "b": 2.1}, {}, {}]).proceed == proceeds
    assert not decide_after(asked, [{"a": 2.0, "b": 2.1}, *[{"a": 2.0, "b": 2.2}] * 2, {}]).proceed


def ends_with_noise(
    asked: CoordinatorSettings, losses: np.ndarray, *, deviation: float, private: bool, seed: int
) -> bool:
    """Whether a federation of three ends early that would report these losses but for noise in them."""
    differential = DifferentialSettings(epsilon=8.0, delta=1e-5) if private else None
    asked = dataclasses.replace(asked, privacy=PrivacySettings(differential=differential))
    noise = np.random.default_rng(seed).normal(0.0, deviation, (len(losses), 3))
    told = [
        dict(zip("abc", map(float, loss + of_round), strict=True)) for loss, of_round in zip(losses, noise, strict=True)
    ]
    deviations = [dict.fromkeys("abc", deviation)] * len(told)
    return any(not decide_after(asked, told[:n], (), deviations[:n]).proceed for n in range(1, len(told)))


LEARNS = np.linspace(3.0, 2.7, 30)
"""By 0.01 a round, which noise of 0.05 in each figure hides from one round to the next."""


@pytest.mark.parametrize(
    ("stop", "losses"),
    [
        ({"patience": 3}, LEARNS),
        ({"target_perplexity": math.exp(2.73)}, np.full(30, 2.75)),
        ({"divergence": 0.05}, LEARNS),
    ],
)
def test_noise_in_the_losses_ends_no_federation(stop: dict[str, float], losses: np.ndarray):
    asked = settings(rounds=30, **stop)  # type: ignore[arg-type]
    ended = [ends_with_noise(asked, losses, deviation=0.05, private=True, seed=seed) for seed in range(20)]
    assert sum(ended) <= 1, "three standard deviations, looked at in 29 rounds"
    believed = [ends_with_noise(asked, losses, deviation=0.05, private=False, seed=seed) for seed in range(20)]
    assert sum(believed) >= 10, "it would have; and without differential privacy no facility's word on noise counts"


@pytest.mark.parametrize(
    ("stop", "losses"),
    [
        ({"patience": 3}, np.r_[np.linspace(3.0, 2.0, 10), np.linspace(2.0, 3.0, 10)]),
        ({"target_perplexity": math.exp(2.5)}, np.linspace(3.0, 2.0, 20)),
        ({"divergence": 0.5}, np.r_[2.0, 2.0, 4.0, 4.0]),
    ],
)
def test_what_noise_does_not_explain_ends_it(stop: dict[str, float], losses: np.ndarray):
    for seed in range(20):
        asked = settings(rounds=30, **stop)  # type: ignore[arg-type]
        assert ends_with_noise(asked, losses, deviation=0.05, private=True, seed=seed)
