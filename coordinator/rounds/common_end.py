"""The common end of a round whose jobs take as many steps as fit: `rounds: {steps: elastic}`.

A pure function over arrays, which the coordinator computes for the next round (`coordinator.steps.elastic`) and the
simulator for every one (`coordinator.simulation.facilities`). Each facility is a divisible load with an empirical
distribution of the time that passes before it trains: the partial work of FedProx (Li et al. 2020, "Federated
Optimization in Heterogeneous Networks", MLSys, section 3.2) by the time that is left (TimelyFL: Zhang et al. 2023,
arXiv 2304.06947, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
WINDOW = 8
"""Latest waits of a facility that count."""
HALVINGS = 60


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Facilities as arrays of one value each."""

    waits: Array
    """(facilities, waits): seconds before training, each as likely as the others of its row; NaN where there are fewer.
    """
    seconds_per_step: Array
    samples_per_step: Array
    least: Array
    """Steps."""
    most: Array
    parts: Array | None = None
    """Whole parts of a step, of which a job takes as many as fit; inf: it can be divided at will. None: one each."""

    def steps_until(self, seconds: float) -> Array:
        """Expected steps of each in a round that ends `seconds` after its model was made.

        Of time for x steps a job takes the whole ones, x - 1/2 where nothing is known of when exactly it begins.
        """
        parts = np.ones(len(self.waits)) if self.parts is None else self.parts
        fits = (seconds - self.waits) / self.seconds_per_step[:, None] - 0.5 / parts[:, None]
        return np.asarray(np.nanmean(np.clip(fits, self.least[:, None], self.most[:, None]), axis=1))

    def samples_until(self, seconds: float) -> float:
        """Expected samples of all together."""
        return float(self.steps_until(seconds) @ self.samples_per_step)

    def end(self, samples: float) -> float:
        """The earliest end, in seconds after the model, at which so many samples are expected of all together.

        No samples are expected earlier than the least that each takes anyway, nor more than its most.
        """
        wanted = min(samples, float(self.most @ self.samples_per_step))
        low = float(np.nanmin(self.waits))
        high = float(np.max(np.nanmax(self.waits, axis=1) + (self.most + 1) * self.seconds_per_step))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.samples_until(middle) >= wanted * (1 - 1e-12) else (middle, high)
        return high
