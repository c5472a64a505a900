"""What a facility reports of its drift correction, in a report's `details`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from facility.exchange.messages.report import Report

KEY = "drift"
MOST_RATES = 1e9
LONGEST_REASON = 300
"""Characters."""


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """One facility's drift correction in one round."""

    rates: float
    """Sum of the learning rates of the steps that were taken; the walk is the change over this."""
    corrected: bool
    """True if every step added the mean walk minus the facility's own."""
    share: float
    """L2 norm of that correction over the norm of what the facility walked by itself; 0 without a correction."""
    reason: str
    """Why there was a correction, or none."""

    def to_json(self) -> dict[str, Any]:
        return {"rates": self.rates, "corrected": self.corrected, "share": self.share, "reason": self.reason}


def drift_of(report: Report | None) -> DriftReport | None:
    """What a facility's report says; None where it says nothing that can be used."""
    detail = report.details.get(KEY) if report is not None else None
    if not isinstance(detail, dict):
        return None
    corrected, reason = detail.get("corrected"), detail.get("reason")
    rates, share = _number(detail.get("rates")), _number(detail.get("share"))
    if not (0 < rates <= MOST_RATES and isinstance(corrected, bool)):
        return None
    words = "".join(c for c in reason if c.isprintable())[:LONGEST_REASON] if isinstance(reason, str) else ""
    return DriftReport(rates=rates, corrected=corrected, share=max(0.0, share), reason=words)


def _number(value: object) -> float:
    """A finite number; -1 for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return -1.0
    return float(value) if -MOST_RATES <= value <= MOST_RATES else -1.0
