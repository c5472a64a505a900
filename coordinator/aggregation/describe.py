"""What round.json says of a round, from what the passes measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coordinator.aggregation.record import Participant, RoundRecord
from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.rules.contract import Plan
from coordinator.aggregation.screening import threads_of
from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.updates import Update
from facility.exchange.checkpoints.checkpoint import FLOATS, TensorEntry
from facility.exchange.checkpoints.floats import Array


def participants(
    opened: Sequence[Update], weights: Sequence[float], plan: Plan, gram: Array | None
) -> list[Participant]:
    """Each update's weight, norm and cosines; `gram` None: nothing was measured."""
    shares = np.asarray(weights)
    norms = np.sqrt(np.maximum(gram.diagonal(), 0)) if gram is not None else np.zeros(len(opened))
    mean_norm = math.sqrt(max(float(shares @ gram @ shares), 0.0)) if gram is not None else 0.0

    def cosine(product: float, lengths: float) -> float:
        return round(float(product / lengths), 6) if lengths > 0 else 0.0

    return [
        Participant(
            facility=update.facility,
            weight=weights[i],
            coefficient=plan.coefficients[i] if plan.coefficients is not None else None,
            tokens=update.report.tokens if update.report else 0,
            samples=update.report.samples if update.report else 0,
            staleness=update.staleness,
            norm=float(norms[i]) if gram is not None else None,
            cosine_to_mean=cosine(gram[i] @ shares, norms[i] * mean_norm) if gram is not None else None,
            cosines={}
            if gram is None
            else {other.facility: cosine(gram[i, j], norms[i] * norms[j]) for j, other in enumerate(opened) if j != i},
        )
        for i, update in enumerate(opened)
    ]


def dtype_decisions(
    opened: Sequence[Update],
    floats: Mapping[str, TensorEntry],
    dtypes: Mapping[str, str],
    settings: AggregationSettings,
) -> dict[str, str]:
    """Output dtype and reason, by `input -> output`."""
    decisions: dict[str, str] = {}
    for name, entry in floats.items():
        sources = sorted({update.entries[name].dtype for update in opened})
        why = "as in the base model" if dtypes[name] == entry.dtype else f"output_dtype is {settings.output_dtype}"
        summed = "float64" if entry.dtype == "F64" else settings.accumulate
        decisions[f"{'+'.join(sources)} -> {dtypes[name]}"] = f"{why}; summed in {summed}, rounded once"
    return decisions


def describe(aggregation: Aggregation) -> RoundRecord:
    """The last stage: the record, without the seconds."""
    settings, measured, passed = aggregation.settings, aggregation.measured, aggregation.passed
    opened, floats, tensors = aggregation.opened, aggregation.floats, aggregation.whole.tensors
    gram = _inner_products(aggregation)
    return RoundRecord(
        federation=aggregation.sent.federation if aggregation.sent else "",
        round=aggregation.number,
        rule=settings.rule,
        combiner=settings.aggregation_rule,
        outer=settings.server_optimizer,
        participants=participants(opened, aggregation.weights, aggregation.plan, gram),
        quarantined=dict(aggregation.quarantined),
        suspects={n: reason for n, reason in aggregation.suspects.items() if n not in aggregation.quarantined},
        dropped=dict(aggregation.dropped),
        tensors_matched=len(floats),
        tensors_personal=sum(1 for name, e in tensors.items() if e.dtype in FLOATS and name not in floats),
        tensors_copied=sum(1 for e in tensors.values() if e.dtype not in FLOATS),
        parameters=passed.elements,
        dtypes=dtype_decisions(opened, floats, aggregation.dtypes, settings),
        mean_norm=_norm(aggregation.weights, gram) if gram is not None else None,
        step_norm=_step_norm(aggregation, gram),
        statistics="exact" if measured else settings.statistics,
        settings=dataclasses.asdict(settings),
        bytes_read=passed.bytes_read + (measured.bytes_read if measured else 0),
        bytes_written=passed.bytes_written,
        threads=threads_of(aggregation),
        details=aggregation.plan.details | aggregation.factor_errors | aggregation.walk | aggregation.moments,
    )


def _inner_products(aggregation: Aggregation) -> Array | None:
    """Inner products of the steps over all elements, estimated from the sample; None where nothing was measured."""
    known = aggregation.measured or (aggregation.passed if aggregation.settings.statistics != "off" else None)
    if known is None:
        return None
    return known.gram * (known.elements / known.counted if known.counted else 1.0)


def _norm(coefficients: Any, gram: Array) -> float:
    """L2 norm of a weighted sum of the steps."""
    factors = np.asarray(coefficients)
    return math.sqrt(max(float(factors @ gram @ factors), 0.0))


def _step_norm(aggregation: Aggregation, gram: Array | None) -> float | None:
    """L2 norm of the master's change; None where nothing was measured."""
    plan, passed, settings = aggregation.plan, aggregation.passed, aggregation.settings
    if not passed.counted:
        return None
    factorised = aggregation.with_adapters and settings.lora == "product"
    if plan.coefficients is not None and settings.server_optimizer == "plain" and gram is not None and not factorised:
        rate = float(settings.values_of(SERVER_OPTIMIZERS.get("plain"))["server_learning_rate"])
        return _norm(np.asarray(plan.coefficients) * rate, gram)
    return math.sqrt(passed.step_squared * passed.elements / passed.counted)
