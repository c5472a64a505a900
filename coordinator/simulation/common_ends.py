"""Jobs that work until the expected end of their round, in a simulated federation: `rounds: {steps: elastic}`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.rounds.common_end import WINDOW, Array, Loads
from coordinator.simulation.described import Scenario, Site

Indices = NDArray[np.intp]


class CommonEnds:
    """What the coordinator knows of each facility's latest jobs, and how much work a job takes by it.

    Work is counted in rounds' work: what a site does in its `train_seconds`.
    """

    def __init__(self, federation: Scenario, sites: Sequence[Site]) -> None:
        self.seconds = np.array([site.train_seconds for site in sites])
        self.samples = np.array([site.samples for site in sites])
        self.whole = np.array([site.round_steps or math.inf for site in sites])
        """Steps of a round's work; inf: it can be divided at will."""
        whole = np.where(np.isinf(self.whole), 1.0, self.whole)
        divided = np.isinf(self.whole)
        self.least = np.where(divided, federation.least_steps, np.ceil(whole * federation.least_steps) / whole)
        self.most = np.where(divided, federation.most_steps, np.floor(whole * federation.most_steps) / whole)
        self.waits = np.full((len(sites), WINDOW), np.nan)
        self.back, self._beside, self._back = (np.zeros(len(sites)) for _ in range(3))

    @property
    def known(self) -> NDArray[np.bool_]:
        """Whose jobs were seen to end."""
        return np.asarray(~np.isnan(self.waits).all(axis=1))

    def next(self) -> float:
        """Seconds from the model to the expected end of its round; inf while fewer than two facilities are known."""
        known = self.known
        if known.sum() < 2:
            return math.inf
        loads = Loads(
            waits=self.waits[known],
            seconds_per_step=self.seconds[known],
            samples_per_step=self.samples[known],
            least=self.least[known],
            most=self.most[known],
            parts=self.whole[known],
        )
        return loads.end(float(self.samples[known].sum()))

    def work(self, index: Indices, left: Array) -> Array:
        """Rounds' work of jobs that begin `left` seconds before the end of their round."""
        if not np.isfinite(left).all():
            return np.ones(len(index))
        fits = np.maximum(left - self.back[index], 0.0) / self.seconds[index]
        whole = self.whole[index]
        steps = np.where(np.isinf(whole), fits, np.floor(fits * np.where(np.isinf(whole), 1.0, whole) + 1e-9) / whole)
        return np.where(self.known[index], np.clip(steps, self.least[index], self.most[index]), 1.0)

    def began(self, index: Indices, beside: Array, back: Array) -> None:
        """Note jobs under way: the seconds that they need beside training, and those of their update's transfer."""
        self._beside[index], self._back[index] = beside, back

    def arrived(self, index: Indices) -> None:
        """Their updates are there: what they needed is known from now on."""
        self.waits[index] = np.roll(self.waits[index], -1, axis=1)
        self.waits[index, -1] = np.maximum(self._beside[index], 0.0)
        self.back[index] = self._back[index]
