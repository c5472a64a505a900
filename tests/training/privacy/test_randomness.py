"""The noise has the distribution that the accounting assumes, and nobody can make it again."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import stats

from facility.training.privacy.randomness import SecretRandom

KEY = bytes(range(32))


def test_normal_values_are_normal():
    values = SecretRandom(KEY).normal(200_001)
    assert values.shape == (200_001,) and values.dtype == np.float64
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert abs(values.mean()) < 5 / math.sqrt(len(values)) and abs(values.std() - 1) < 0.01
    half = len(values) // 2
    assert abs(np.corrcoef(values[:half], values[half : 2 * half])[0, 1]) < 5 / math.sqrt(half)


def test_a_sample_holds_each_unit_with_the_rate_and_by_itself():
    random = SecretRandom(KEY)
    draws = np.zeros((4000, 20), dtype=bool)
    for row in draws:
        row[random.chosen(20, 0.3)] = True
    shares = draws.mean(0)
    assert np.all(np.abs(shares - 0.3) < 5 * math.sqrt(0.21 / 4000))
    sizes = draws.sum(1)  # binomial, not fixed
    assert abs(sizes.var() - 20 * 0.21) < 0.5
    assert len(random.chosen(20, 1.0)) == 20 and len(random.chosen(0, 0.5)) == 0


def test_noise_is_added_to_every_value_with_the_deviation(monkeypatch):
    monkeypatch.setattr("facility.training.privacy.randomness.PIECE", 1000)
    tensor = torch.full((300, 111), 5.0)
    SecretRandom(KEY).add_normal(tensor, 0.5)
    assert abs(tensor.mean().item() - 5) < 0.02 and abs(tensor.std().item() - 0.5) < 0.02
    assert len(tensor.unique()) > 0.9 * tensor.numel()
    alone = torch.zeros(1, dtype=torch.float64)
    SecretRandom(KEY).add_normal(alone, 2.0)
    assert alone.item() != 0


def test_no_two_starts_have_the_same_noise():
    torch.manual_seed(0)
    np.random.seed(0)
    one, other = SecretRandom().normal(8), SecretRandom().normal(8)
    assert not np.isin(one, other).any()
