"""The accounting against closed forms, against the published bound of another accountant, and its monotony."""

from __future__ import annotations

import math

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from facility.exchange.privacy.accounting import Releases, epsilon_of, least_noise


def gaussian_epsilon(noise: float, delta: float) -> float:
    """Of one Gaussian mechanism, exactly (B. Balle, Y.-X. Wang, ICML 2018, arXiv 1805.06530, theorem 8)."""

    def excess(epsilon: float) -> float:
        a, b = 1 / (2 * noise), epsilon * noise
        return norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b) - delta

    return float(brentq(excess, 0, 200))


@pytest.mark.parametrize(("noise", "count"), [(1.0, 1), (3.0, 1), (4.0, 16), (20.0, 25)])
def test_gaussian_releases_compose_to_one_with_less_noise(noise: float, count: int):
    """n releases of deviation s are one of deviation s / sqrt(n)."""
    exact = gaussian_epsilon(noise / math.sqrt(count), 1e-5)
    found = epsilon_of([Releases(count=count, noise_multiplier=noise)], 1e-5)
    assert exact <= found * (1 + 1e-6) and found < exact * 1.01 + 2e-3


def test_a_sample_amplifies_and_the_bound_is_tighter_than_renyi():
    """20,000 units, 256 a step, 1,000 steps, noise 1: Rényi accounting gives 2.81 at 5e-6."""
    found = epsilon_of([Releases(count=1000, noise_multiplier=1.0, sampling_rate=256 / 20_000)], 5e-6)
    assert found == pytest.approx(2.504, abs=0.01)
    assert epsilon_of([Releases(count=1000, noise_multiplier=1.0)], 5e-6) > 100


def test_the_least_noise_is_just_enough():
    budget = {"epsilon": 4.0, "delta": 1e-5}
    noise = least_noise(count=50, sampling_rate=0.05, **budget)
    assert noise is not None

    def epsilon(factor: float) -> float:
        return epsilon_of([Releases(count=50, noise_multiplier=noise * factor, sampling_rate=0.05)], 1e-5)

    assert epsilon(1.0) <= 4.0 < epsilon(0.995)


def test_nothing_costs_nothing_and_a_spent_budget_has_no_noise():
    assert epsilon_of([], 1e-5) == 0
    spent = [Releases(count=1, noise_multiplier=0.5)]
    assert least_noise(count=1, sampling_rate=0.1, epsilon=1.0, delta=1e-5, before=spent) is None
