"""DARE: drop changes at random and rescale the rest, then average.

L. Yu, B. Yu, H. Yu, F. Huang, Y. Li, "Language models are super Mario: absorbing abilities from homologous models as a
free lunch", ICML 2024, arXiv 2311.03099, equation 3: each change stays with probability 1 - p and is divided by 1 - p.

The random choice is a counter-based one (Philox, Salmon et al. 2011), keyed by seed, round, facility and tensor and
placed by the values' offset: it does not depend on the order of work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from coordinator.aggregation.rules import mean
from coordinator.aggregation.rules.contract import AggregationRule, Plan, RoundUpdates
from facility.exchange.checkpoints.floats import Array
from facility.exchange.registry import Parameter

DECLARATION = AggregationRule(
    name="dare",
    summary="drop at random and rescale",
    citation="Yu et al. 2024, arXiv 2311.03099",
    implementation="plan",
    parameters=(
        Parameter(
            name="density", default=0.2, above=0, at_most=1, text="Share of each update that ties and dare keep."
        ),
        Parameter(name="seed", default=0, text="Seed of dare's random choice, mixed with round, facility and tensor."),
    ),
    lengthens=True,
)

BLOCK = 1 << 16
"""Values of one counter."""
DRAWN = 8
"""Values of one draw: offsets at which a piece of a block may begin."""


def kept(seed: int, round: int, facility: str, tensor: str, offset: int, count: int, density: float) -> Array:
    """Which of `count` values from element `offset` on (a multiple of DRAWN) stay; all of them in one BLOCK."""
    block, begin = divmod(offset, BLOCK)
    assert begin % DRAWN == 0 and begin + count <= BLOCK, (offset, count)
    digest = hashlib.sha256(f"{seed}/{round}/{facility}/{tensor}".encode()).digest()
    key = np.frombuffer(digest[:16], "<u8")
    raw = np.random.Philox(key=key, counter=[begin // DRAWN, block, 0, 0]).random_raw((count + 1) // 2)
    return raw.astype("<u8").view("<u4")[:count] < np.uint64(round_up(density))


def round_up(density: float) -> int:
    """The density in units of 2 ** -32."""
    return min(1 << 32, int(np.ceil(density * 2.0**32)))


def combine(steps: Array, masks: Sequence[Array], weights: Sequence[float], density: float) -> Array:
    """Weighted mean of the kept values, each divided by the density."""
    return mean.combine(steps * np.asarray(masks), [weight / density for weight in weights])


def plan(
    updates: RoundUpdates,
    *,
    density: float,
    seed: int,
) -> Plan:
    """A random choice of values for each update."""

    def dropped(steps: Array, tensor: str, offset: int) -> Array:
        width = steps.shape[1]
        masks = [kept(seed, updates.number, name, tensor, offset, width, density) for name in updates.facilities]
        return combine(steps, masks, updates.weights, density)

    return Plan(combine=dropped)
