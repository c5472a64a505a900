"""Audit with a canary: what an attacker can tell of one record, measured, stays below the stated epsilon.

Models are trained many times with and without one record that no other resembles. From the final models alone the
attacker tells the two apart; the rates of errors bound epsilon from below with 95 % confidence (C. Clopper, E. Pearson
1934; M. Jagielski, J. Ullman, A. Oprea, "Auditing differentially private machine learning", NeurIPS 2020, arXiv
2006.07709). The keys of all noise are fixed, so that a run is like every other.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import beta
from torch import nn

from facility.exchange.privacy.accounting import least_noise
from facility.training.data.tasks import CausalLM
from facility.training.parallel.compute import Precision
from facility.training.privacy.gradients import RecordGradients
from facility.training.privacy.private import add_noise
from facility.training.privacy.randomness import SecretRandom
from facility.training.privacy.rows import Rows

STEPS, RATE, CLIP, EPSILON, DELTA = 3, 0.7, 0.5, 1.0, 1e-3
VOCABULARY = CANARY = 6
RECORDS = torch.tensor([[i % 6, (i + 1) % 6, (i + 2) % 6, (i + 3) % 6] for i in range(10)] + [[CANARY] * 4])


class Bigrams(nn.Module):
    """Predicts a token from the one before; the canary's token is in no other record."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(VOCABULARY + 1, VOCABULARY + 1))

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def score(noise: float, *, canary: bool, key: int) -> float:
    """How far a model trained in few noised steps has moved along the canary's gradient, and nothing else's."""
    model, random = Bigrams(), SecretRandom(key.to_bytes(32, "little"))
    precision = Precision(torch.device("cpu"), torch.float32, casts_itself=False)
    gradients = RecordGradients(model, [model.table], CausalLM(), precision, vectorise=True)
    records = RECORDS if canary else RECORDS[:-1]
    for _ in range(STEPS):
        ids = records[random.chosen(len(records), RATE)]
        targets = torch.cat([ids[:, 1:], torch.full((len(ids), 1), -100)], 1)
        rows = Rows(inputs={"input_ids": ids}, targets=targets, record=torch.arange(len(ids)), records=len(ids))
        sums = gradients.clipped_sum([rows] if len(ids) else [], CLIP)
        add_noise(sums, random, noise * CLIP)
        with torch.no_grad():
            model.table -= 0.5 * sums[0]
    row = model.table.detach()[CANARY]
    return float(row[CANARY] - row.mean())


def scores(noise: float, runs: int) -> tuple[np.ndarray, np.ndarray]:
    with_it, without = ([score(noise, canary=c, key=2 * k + c) for k in range(runs)] for c in (True, False))
    return np.array(with_it), np.array(without)


def epsilon_at_least(with_it: np.ndarray, without: np.ndarray) -> float:
    """Lower bound of epsilon: the threshold is chosen on a quarter of the runs, and its errors counted on the rest.

    Chosen is the one whose bound would be best, were the rates of the quarter those of the rest.
    """
    some, best, bound = len(with_it) // 4, -math.inf, 0.0
    rest = len(with_it) - some
    for threshold in np.unique(np.concatenate([with_it[:some], without[:some]])):
        caught, wrong = (with_it[:some] >= threshold).mean(), (without[:some] >= threshold).mean()
        surely = caught - 2 * math.sqrt(caught * (1 - caught) / rest)
        at_most = wrong + 2 * math.sqrt(wrong * (1 - wrong) / rest) + 2 / rest
        if (gain := math.log(max(surely, 1e-9) / at_most)) > best:
            best, chosen = gain, threshold
    caught, wrong = int((with_it[some:] >= chosen).sum()), int((without[some:] >= chosen).sum())
    least = beta.ppf(0.025, caught, rest - caught + 1) if caught else 0.0
    most = beta.ppf(0.975, wrong + 1, rest - wrong) if wrong < rest else 1.0
    if least > DELTA:
        bound = max(0.0, math.log((least - DELTA) / most))
    return bound


def audited(runs: int, *factors: float) -> list[float]:
    """Lower bounds of epsilon with so many times the planned noise."""
    noise = least_noise(count=STEPS, sampling_rate=RATE, epsilon=EPSILON, delta=DELTA)
    assert noise is not None
    return [epsilon_at_least(*scores(noise * factor, runs)) for factor in factors]


@pytest.mark.slow
def test_the_canary_tells_no_more_than_is_stated_and_far_more_without_noise():
    planned, none = audited(120, 1.0, 0.0)
    assert planned <= EPSILON and none > 2 * EPSILON, (planned, none)


@pytest.mark.nightly
@pytest.mark.slow
def test_an_audit_of_many_runs_finds_out_noise_that_is_too_small():
    planned, too_little, none = audited(2000, 1.0, 0.2, 0.0)
    assert planned <= EPSILON < too_little < none, "a fifth of the noise is found out"
    assert none > 4 * EPSILON, (planned, too_little, none)
