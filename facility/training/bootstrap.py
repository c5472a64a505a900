"""Bootstrap intervals of mean losses over resampled blocks.

Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13 (percentile interval); models are compared
over the same resamples, as in Koehn, "Statistical Significance Tests for Machine Translation Evaluation", EMNLP 2004,
section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from facility.exchange.messages.comparison import LEVEL, RESAMPLES, Interval

SEED = 0
AT_ONCE = 50
"""Resamples drawn together: memory for this many times the blocks."""


@dataclass(frozen=True, kw_only=True)
class BlockLosses:
    """One model on one data set, block by block. Never leaves the facility."""

    losses: np.ndarray
    """Summed over the predictions of each block, nats; float64."""
    predictions: np.ndarray

    @property
    def mean(self) -> float:
        """Nats per prediction; NaN without any."""
        predictions = int(self.predictions.sum())
        return float(self.losses.sum()) / predictions if predictions else math.nan


def mean_loss_interval(one: BlockLosses) -> Interval:
    """The mean loss per prediction, and where it lies over resamples of the blocks."""
    values = [losses / predictions for losses, predictions in _resampled(one)]
    return _interval(one.mean, np.concatenate(values))


def loss_difference(one: BlockLosses, other: BlockLosses) -> Interval:
    """The mean loss of `one` less that of `other`, on the same blocks."""
    values = [
        mine[0] / mine[1] - theirs[0] / theirs[1]
        for mine, theirs in zip(_resampled(one), _resampled(other), strict=True)
    ]
    return _interval(one.mean - other.mean, np.concatenate(values))


def _interval(value: float, resampled: np.ndarray) -> Interval:
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value=value, low=float(low), high=float(high))


def _resampled(one: BlockLosses) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Summed losses and predictions of resamples, some at a time; the same draws for data sets of as many blocks."""
    draw = np.random.Generator(np.random.PCG64(SEED))
    count = len(one.losses)
    for begin in range(0, RESAMPLES, AT_ONCE):
        chosen = draw.integers(0, count, (min(AT_ONCE, RESAMPLES - begin), count))
        yield one.losses[chosen].sum(axis=1), np.maximum(one.predictions[chosen].sum(axis=1), 1)
