"""The privacy loss of noised releases, by Google's `dp-accounting`: its privacy-loss-distribution accountant.

Neighbouring datasets differ in one unit, added or removed. A training step is the Gaussian mechanism on a Poisson
sample of the units (M. Abadi et al., "Deep learning with differential privacy", CCS 2016, arXiv 1607.00133); steps
compose as privacy-loss distributions do (A. Koskela, J. Jälkö, A. Honkela, "Computing tight differential privacy
guarantees using FFT", AISTATS 2020, arXiv 1906.03049). The accountant rounds every loss up, so that what it returns is
an upper bound whatever the width of its grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from facility.exchange.errors import InputError

GRID = 1e-3
"""Width of the grid of privacy losses. A ten times finer one lowers an epsilon by less than 0.5 %."""
LEAST, MOST = 0.05, 1e6
"""Noise multipliers that are looked at."""
DIGITS = 1e-4
"""A noise multiplier is rounded up to a multiple of this share of itself."""


@dataclass(frozen=True, kw_only=True)
class Releases:
    """Equal releases, one after the other."""

    count: int
    noise_multiplier: float
    """Standard deviation of the noise as a multiple of the most that one unit contributes."""
    sampling_rate: float = 1.0
    """Probability with which a unit takes part in a release."""


def epsilon_of(releases: Sequence[Releases], delta: float) -> float:
    """The epsilon that all releases together have at `delta`; 0 without any."""
    return _epsilon(tuple(one for one in releases if one.count), delta)


def least_noise(
    *, count: int, sampling_rate: float, epsilon: float, delta: float, before: Sequence[Releases] = ()
) -> float | None:
    """The least noise multiplier with which `count` releases after those `before` stay within the budget.

    None where no noise is enough: what was released before leaves nothing over.
    """
    spent = tuple(one for one in before if one.count)
    if spent and epsilon_of(spent, delta) >= epsilon:
        return None

    def fits(noise: float) -> bool:
        more = Releases(count=count, noise_multiplier=noise, sampling_rate=sampling_rate)
        return epsilon_of([*spent, more], delta) <= epsilon

    low, high = LEAST, 1.0
    while not fits(high):
        low, high = high, 2 * high
        if high > MOST:
            return None
    while low == LEAST and high > 2 * LEAST and fits(high / 2):
        high /= 2
    low = max(LEAST, high / 2)
    while high / low > 1 + DIGITS:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return _rounded_up(high)


def _rounded_up(noise: float) -> float:
    """Four digits after the first: the same number on every machine."""
    unit = 10.0 ** (math.floor(math.log10(noise)) - 4)
    return round(math.ceil(noise / unit) * unit, 12)


@cache
def _epsilon(releases: tuple[Releases, ...], delta: float) -> float:
    if not releases:
        return 0.0
    accounting = accounting_library()
    accountant = accounting.pld.PLDAccountant(value_discretization_interval=GRID)
    for one in releases:
        event = accounting.GaussianDpEvent(one.noise_multiplier)
        if one.sampling_rate < 1:
            event = accounting.PoissonSampledDpEvent(one.sampling_rate, event)
        accountant.compose(event, one.count)
    return float(accountant.get_epsilon(delta))


def accounting_library() -> Any:
    """`dp_accounting`, imported only where differential privacy is asked for: it takes two seconds."""
    try:
        import dp_accounting
        import dp_accounting.pld
    except ImportError as error:
        raise InputError(
            f"differential privacy needs dp-accounting, which cannot be imported ({error}): run facility/setup.sh (or "
            "coordinator/setup.sh) again"
        ) from None
    return dp_accounting
