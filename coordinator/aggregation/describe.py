"""What round.json says of a round, from what the passes measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from coordinator.aggregation.kernel import Passed
from coordinator.aggregation.plan import Plan
from coordinator.aggregation.record import Participant, RoundRecord
from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS
from coordinator.aggregation.updates import Update
from coordinator.config.aggregation import AggregationSettings
from facility.exchange.checkpoints.checkpoint import FLOATS, Checkpoint, TensorEntry
from facility.exchange.checkpoints.floats import Array
from facility.exchange.messages.manifest import Manifest


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


def describe(
    *,
    opened: Sequence[Update],
    weights: Sequence[float],
    settings: AggregationSettings,
    plan: Plan,
    measured: Passed | None,
    passed: Passed,
    base: Checkpoint,
    base_manifest: Manifest | None,
    floats: Mapping[str, TensorEntry],
    dtypes: Mapping[str, str],
    suspects: Mapping[str, str],
    quarantined: Mapping[str, str],
    threads: int,
) -> RoundRecord:
    """The record, without the seconds."""
    known = measured or (passed if settings.statistics != "off" else None)
    # A sample stands for all elements: squared norms are scaled up.
    scale = known.elements / known.counted if known and known.counted else 1.0
    gram = known.gram * scale if known else None
    shares = np.asarray(weights)
    step = None
    if passed.counted:
        if plan.coefficients is not None and settings.server_optimizer == "plain" and gram is not None:
            rate = settings.values_of(SERVER_OPTIMIZERS.get("plain"))["server_learning_rate"]
            factors = np.asarray(plan.coefficients) * rate
            step = math.sqrt(max(float(factors @ gram @ factors), 0.0))
        else:
            step = math.sqrt(passed.step_squared * passed.elements / passed.counted)
    tensors = base.tensors
    return RoundRecord(
        federation=base_manifest.federation if base_manifest else "",
        round=base_manifest.round if base_manifest else 0,
        rule=settings.rule,
        combiner=settings.aggregation_rule,
        outer=settings.server_optimizer,
        participants=participants(opened, weights, plan, gram),
        quarantined=dict(quarantined),
        suspects={name: reason for name, reason in suspects.items() if name not in quarantined},
        tensors_matched=len(floats),
        tensors_personal=sum(1 for name, e in tensors.items() if e.dtype in FLOATS and name not in floats),
        tensors_copied=sum(1 for e in tensors.values() if e.dtype not in FLOATS),
        parameters=passed.elements,
        dtypes=dtype_decisions(opened, floats, dtypes, settings),
        mean_norm=math.sqrt(max(float(shares @ gram @ shares), 0.0)) if gram is not None else None,
        step_norm=step,
        statistics="exact" if measured else settings.statistics,
        settings=dataclasses.asdict(settings),
        bytes_read=passed.bytes_read + (measured.bytes_read if measured else 0),
        bytes_written=passed.bytes_written,
        threads=threads,
        details=plan.details,
    )
