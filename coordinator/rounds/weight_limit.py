"""Limits the weight that a facility reports, by its steps, its batch and the longest sequence.

The claim is the update's weight in the mean. A facility is given its steps and batch by the rendered settings, so a
larger claim is a mistake or an attempt to outweigh the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.config.settings import CoordinatorSettings
from facility.exchange.checkpoints.families import most_positions, text_part
from facility.exchange.checkpoints.model_files import model_file_if_any
from facility.exchange.messages.report import Report


@dataclass(frozen=True, kw_only=True)
class WeightLimit:
    """The most that one facility can have trained on in a round."""

    samples: int
    """Sequences: steps x batch."""
    tokens: int
    """Those times the longest sequence."""
    why: str

    def excess(self, report: Report) -> str:
        """What the report claims beyond this, as a sentence, or ''."""
        for name, allowed in (("samples", self.samples), ("tokens", self.tokens)):
            if (claimed := getattr(report, name)) > allowed:
                return (
                    f"it claims {claimed:,} {name} in round {report.round}, its settings allow {allowed:,} ({self.why})"
                )
        return ""


def weight_limit_of(settings: CoordinatorSettings, facility: str, model: Path) -> WeightLimit | None:
    """Limit for `facility`, which trains `model`; None where nothing bounds a sequence, or nothing is to be bounded."""
    sequences = settings.sequences.get(facility, 0)
    longest = settings.claims.sequence_tokens or longest_sequence(model)
    if settings.claims.action == "off" or not sequences or not longest:
        return None
    return WeightLimit(
        samples=sequences,
        tokens=sequences * longest,
        why=f"steps x batch is {sequences:,} sequences, of {longest:,} tokens at most",
    )


def longest_sequence(model: Path) -> int:
    """Tokens of the longest sequence that the model takes, by its config.json; 0 where that does not say."""
    config = model_file_if_any(model)
    part = text_part(config)
    return most_positions(part) if isinstance(part, dict) else 0


@dataclass(frozen=True, kw_only=True)
class Capped:
    """Claims cut down to what is allowed."""

    weights: dict[str, float]
    """What counts, by facility; empty: nothing was cut and the reports stand."""
    reasons: dict[str, str]
    """What was claimed, by the facilities whose claims were cut."""


def cap(settings: CoordinatorSettings, reports: Mapping[str, Report], model: Path) -> Capped:
    """Cut excessive claims where `claims.action` asks for it."""
    kind = settings.aggregation.weights
    if settings.claims.action != "cap" or kind not in ("tokens", "samples"):
        return Capped(weights={}, reasons={})
    weights, reasons = {}, {}
    for name, report in reports.items():
        weight_limit = weight_limit_of(settings, name, model)
        weights[name] = float(getattr(report, kind))
        if weight_limit and (excess := weight_limit.excess(report)):
            weights[name] = float(min(weights[name], getattr(weight_limit, kind)))
            reasons[name] = f"{excess}; {weights[name]:,.0f} count"
    return Capped(weights=weights if reasons else {}, reasons=reasons)
