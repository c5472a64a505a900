"""From what one pass has measured to what the next one computes: a rule's decisions, with the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordinator.aggregation.rules import bulyan, clipping, dare, geometric_median, krum, median, ties, trimmed_mean
from coordinator.config.aggregation import AggregationSettings
from facility.exchange.checkpoints.floats import Array

LINEAR = ("mean", "geometric_median", "krum", "multi_krum")
MEASURED = ("geometric_median", "krum", "multi_krum", "bulyan", "ties")

Combine = Callable[[Array, str, int], Array]
"""(steps of shape (updates, n), tensor, offset of the first value) -> n values."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the steps of a round become one."""

    coefficients: list[float] | None = None
    """Of a weighted sum."""
    combine: Combine | None = None
    """Value by value, where the rule is no weighted sum."""
    details: dict[str, Any] = field(default_factory=dict)
    """For round.json."""


def needs_measuring(settings: AggregationSettings) -> bool:
    """Whether the rule must see all steps once before it can combine them."""
    return bool(
        settings.combiner in MEASURED
        or settings.clip_norm
        or settings.clip_ratio
        or settings.screen.action == "quarantine"
    )


def make_plan(
    settings: AggregationSettings,
    names: Sequence[str],
    weights: Sequence[float],
    *,
    gram: Array | None = None,
    histograms: Sequence[Array] | None = None,
    round: int = 0,
) -> Plan:
    """The plan for updates of facilities `names`; `gram` and `histograms` as measured, where the rule needs them."""
    combiner, count = settings.combiner, len(names)
    details: dict[str, Any] = {}
    factors = [1.0] * count
    if settings.clip_norm or settings.clip_ratio:
        assert gram is not None
        norms = [float(np.sqrt(max(value, 0.0))) for value in gram.diagonal()]
        limit = clipping.limit_of(norms, clip_norm=settings.clip_norm, clip_ratio=settings.clip_ratio)
        factors = clipping.factors(norms, limit)
        details |= {"clip_limit": limit, "clip_factors": dict(zip(names, factors, strict=True))}
        scale = np.array(factors)
        gram = gram * scale[:, None] * scale[None, :]

    def linear(shares: Sequence[float]) -> Plan:
        values = [float(share) * factor for share, factor in zip(shares, factors, strict=True)]
        return Plan(coefficients=values, details=details)

    def pointwise(function: Combine) -> Plan:
        if any(factor != 1 for factor in factors):
            inner = function

            def function(steps: Array, tensor: str, offset: int) -> Array:
                return inner(steps * np.asarray(factors, steps.dtype)[:, None], tensor, offset)

        return Plan(combine=function, details=details)

    if combiner == "mean":
        return linear(weights)
    if combiner == "geometric_median":
        assert gram is not None
        return linear(geometric_median.coefficients(gram, np.array(weights), iterations=settings.iterations).tolist())
    if combiner in ("krum", "multi_krum"):
        assert gram is not None
        chosen = krum.select(gram, settings.byzantine, multiple=combiner == "multi_krum")
        details["selected"] = [names[i] for i in chosen]
        return linear([1 / len(chosen) if i in chosen else 0.0 for i in range(count)])
    if combiner == "median":
        return pointwise(lambda steps, tensor, offset: median.combine(steps))
    if combiner == "trimmed_mean":
        drop = trimmed_mean.dropped(count, settings.trim)
        details["dropped_at_either_end"] = drop
        return pointwise(lambda steps, tensor, offset: trimmed_mean.combine(steps, drop))
    if combiner == "bulyan":
        assert gram is not None
        chosen = bulyan.select(gram, settings.byzantine)
        details["selected"] = [names[i] for i in chosen]
        return pointwise(lambda steps, tensor, offset: bulyan.combine(steps[chosen], settings.byzantine))
    if combiner == "ties":
        assert histograms is not None
        thresholds = [ties.threshold(counts, settings.density) for counts in histograms]
        details["thresholds"] = dict(zip(names, thresholds, strict=True))
        scaled = [threshold * factor for threshold, factor in zip(thresholds, factors, strict=True)]
        return pointwise(lambda steps, tensor, offset: ties.combine(steps, weights, scaled))
    assert combiner == "dare", combiner

    def dropped(steps: Array, tensor: str, offset: int) -> Array:
        width, density = steps.shape[1], settings.density
        masks = [dare.kept(settings.seed, round, name, tensor, offset, width, density) for name in names]
        return dare.combine(steps, masks, weights, density)

    return pointwise(dropped)
