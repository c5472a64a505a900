"""The third stage of an aggregation (`coordinator.aggregation.run`): how the updates' steps become one.

From what the measuring pass found, clipping first, then the aggregation rule's decision; what the rule asks for in its
`needs` is handed to it here. Of the tensors, only those are read that may be one weight under two names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from coordinator.aggregation import clipping
from coordinator.aggregation.one_weight import one_weight
from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.rules.contract import (
    HISTOGRAMS,
    INNER_PRODUCTS,
    MOMENTUM,
    SORTED_VALUES,
    TENSOR_PRODUCTS,
    Combine,
    Plan,
    RoundUpdates,
    TensorCoefficients,
)
from coordinator.aggregation.rules.registry import RULES, decide
from coordinator.aggregation.settings import AUTOMATIC, AggregationSettings
from coordinator.aggregation.squared_gradients import squared_gradients
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.running_statistics import is_running_statistic


def needs_histograms(settings: AggregationSettings) -> bool:
    """Whether the rule wants a histogram of each update's magnitudes."""
    return HISTOGRAMS in RULES.get(settings.aggregation_rule).needs


def needs_tensor_products(settings: AggregationSettings) -> bool:
    """Whether the rule wants the inner products of every tensor by itself."""
    return TENSOR_PRODUCTS in RULES.get(settings.aggregation_rule).needs


def needs_momentum(settings: AggregationSettings) -> bool:
    """Whether the rule looks at the server optimizer's momentum."""
    return MOMENTUM in RULES.get(settings.aggregation_rule).needs


def needs_measuring(settings: AggregationSettings, count: int) -> bool:
    """Whether all steps of `count` updates must be seen once before they can be combined."""
    return bool(
        {INNER_PRODUCTS, TENSOR_PRODUCTS, HISTOGRAMS, MOMENTUM} & set(RULES.get(settings.aggregation_rule).needs)
        or settings.clip_norm
        or clip_ratio(settings, count)
        or (settings.screen.action in ("auto", "quarantine") and count >= settings.screen.minimum_updates)
    )


def norms_suffice(settings: AggregationSettings, count: int) -> bool:
    """Whether the norms of `count` updates' steps are all that must be known before they can be combined."""
    rule = {INNER_PRODUCTS, TENSOR_PRODUCTS, HISTOGRAMS, MOMENTUM} & set(RULES.get(settings.aggregation_rule).needs)
    exact = settings.statistics == "exact" and settings.accumulate == "float32"
    return exact and not rule and settings.lora != "product" and needs_measuring(settings, count)


def clip_ratio(settings: AggregationSettings, count: int) -> float:
    """Multiple of the median norm to which steps are clipped; 0: they are not."""
    if settings.clip_ratio == AUTOMATIC:
        return 1.0 if count >= settings.screen.minimum_updates else 0.0
    return settings.clip_ratio


def plan_round(aggregation: Aggregation) -> None:
    """The third stage: fill in how the steps become one."""
    if (unmasking := aggregation.request.unmasking) is not None:
        aggregation.plan = Plan(coefficients=aggregation.weights, details=dict(unmasking.details))
        return
    updates = RoundUpdates(
        facilities=aggregation.names,
        weights=aggregation.weights,
        number=aggregation.number,
        inner_products=_gram(aggregation),
        tensor_products=aggregation.measured.by_tensor if aggregation.measured else None,
        momentum_products=aggregation.measured.along_momentum if aggregation.measured else None,
        staleness=[update.staleness for update in aggregation.opened],
        histograms=aggregation.histograms,
        squared_gradients=squared_gradients(aggregation) if aggregation.settings.weighs_rows else None,
    )
    plan = make_plan(aggregation.settings, updates)
    if plan.coefficients is None:
        plan = _same_for_one_weight(plan, aggregation)
    details: dict[str, Any] = {"capped_shares": aggregation.capped} if aggregation.capped else {}
    if aggregation.with_adapters:
        details |= {"lora": aggregation.settings.lora}
    aggregation.plan = dataclasses.replace(plan, details=plan.details | details)


def _same_for_one_weight(plan: Plan, aggregation: Aggregation) -> Plan:
    """The plan, but the names of one weight are one to it: the first that it combines value by value, else the first.

    A tied weight has second moments under one of its names alone.
    """
    names = one_weight(aggregation.floats, [update.entries for update in aggregation.opened])
    first = {
        name: next((one for one in group if plan.coefficients_of(one) is None), group[0])
        for name, group in names.items()
    }
    by_tensor, combine = plan.tensor_coefficients, plan.combine
    if first and by_tensor is not None:
        plan = dataclasses.replace(plan, tensor_coefficients=lambda tensor: by_tensor(first.get(tensor, tensor)))
    if first and combine is not None:
        plan = dataclasses.replace(
            plan, combine=lambda steps, tensor, offset: combine(steps, first.get(tensor, tensor), offset)
        )
    return plan


def _gram(aggregation: Aggregation) -> Array | None:
    """Inner products of the steps, as measured; of stated norms, which suffice for clipping, the diagonal alone."""
    if aggregation.measured is not None:
        return aggregation.measured.gram
    return None if aggregation.stated is None else np.diag(aggregation.stated)


def make_plan(settings: AggregationSettings, updates: RoundUpdates) -> Plan:
    """The plan for these updates, which are not clipped yet: the rule is shown what clipping leaves of their steps."""
    details: dict[str, Any] = {}
    factors: list[float] = []
    if settings.clip_norm or clip_ratio(settings, updates.count):
        assert updates.inner_products is not None
        limit, factors = _clipped(settings, updates.inner_products)
        if math.isfinite(limit):
            details = {"clip_limit": limit, "clip_factors": dict(zip(updates.facilities, factors, strict=True))}
        updates = _scaled(updates, factors)
    rule = RULES.get(settings.aggregation_rule)
    if INNER_PRODUCTS not in rule.needs:
        updates = dataclasses.replace(updates, inner_products=None)
    plan = decide(settings.aggregation_rule, updates, settings.values_of(rule))
    if rule.lengthens:
        plan = _averaging_statistics(plan, list(updates.weights))
    if plan.coefficients is not None:
        values = [float(c) * f for c, f in zip(plan.coefficients, factors or [1.0] * updates.count, strict=True)]
        return dataclasses.replace(plan, coefficients=values, details=details | plan.details)
    by_tensor, combine = plan.tensor_coefficients, plan.combine
    if combine is not None and SORTED_VALUES in rule.needs:
        combine = _sorting(combine)
    if any(factor != 1 for factor in factors):
        by_tensor = by_tensor and _scaling_coefficients(by_tensor, factors)
        combine = combine and _scaling(combine, [*factors, 1.0] if MOMENTUM in rule.needs else factors)
    return dataclasses.replace(plan, tensor_coefficients=by_tensor, combine=combine, details=details | plan.details)


def _clipped(settings: AggregationSettings, gram: Array) -> tuple[float, list[float]]:
    """The largest norm, and what each update's step is multiplied by."""
    norms = [float(np.sqrt(max(value, 0.0))) for value in gram.diagonal()]
    limit = clipping.limit_of(norms, clip_norm=settings.clip_norm, clip_ratio=clip_ratio(settings, len(gram)))
    return limit, clipping.factors(norms, limit)


def _scaled(updates: RoundUpdates, factors: list[float]) -> RoundUpdates:
    """The updates with their steps multiplied by `factors`."""
    assert updates.inner_products is not None
    scale = np.array(factors)
    both = np.outer(scale, scale)  # symmetric to the last bit: of two updates alike, rules take the earlier one
    by_tensor, along = updates.tensor_products or {}, updates.momentum_products or {}
    return dataclasses.replace(
        updates,
        inner_products=updates.inner_products * both,
        tensor_products={name: one * both for name, one in by_tensor.items()},
        momentum_products={name: one * np.append(scale, 1.0) for name, one in along.items()},
        clip_factors=factors,
    )


def _averaging_statistics(plan: Plan, weights: list[float]) -> Plan:
    """The plan, but running statistics of batch normalisation are the updates' plain weighted mean."""

    def by_tensor(tensor: str) -> Sequence[float] | None:
        return weights if is_running_statistic(tensor) else plan.coefficients_of(tensor)

    return dataclasses.replace(plan, coefficients=None, tensor_coefficients=by_tensor)


def _sorting(combine: Combine) -> Combine:
    return lambda steps, tensor, offset: combine(np.sort(steps, axis=0), tensor, offset)


def _scaling_coefficients(by_tensor: TensorCoefficients, factors: Sequence[float]) -> TensorCoefficients:
    def scaled(tensor: str) -> list[float] | None:
        found = by_tensor(tensor)
        return None if found is None else [one * factor for one, factor in zip(found, factors, strict=True)]

    return scaled


def _scaling(combine: Combine, factors: Sequence[float]) -> Combine:
    return lambda steps, tensor, offset: combine(steps * np.asarray(factors, steps.dtype)[:, None], tensor, offset)
